"""Which code made a number: a hash of the package's source, and the commit of its checkout."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def source() -> str:
    """A hash of this package's code, and of its templates, as they are on the disk now."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.j2"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def git(*arguments: str) -> str | None:
    """What git says of the checkout that the package is in; None where it is in none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
