"""The code that made a number: a hash of the package's source, and the commit of its checkout."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def source() -> str:
    """A hash of this package's Python files and templates as they are on the disk now: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.j2"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def git(*arguments: str) -> str | None:
    """What git prints about the checkout that holds the package; None without a checkout, or where git fails."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    command = ["git", "-C", str(PACKAGE.parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
