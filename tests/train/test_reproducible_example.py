"""examples/reproducible.py: losses and weights have the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multi
def test_training_has_the_same_bits_on_any_number_of_ranks() -> None:
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import reproducible as example\n"
    script += "if __name__ == '__main__':\n    sys.exit(0 if example.main([1, 2, 4], steps=2) else 'the bits differ')\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len({line.split()[-1] for line in lines}) == 1
