"""examples/reproducible.py: losses and weights have the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import ringattn

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multi
def test_training_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(
        f"import sys, torch; torch.set_num_threads(1); sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "import reproducible as example\n"
        "sys.exit(0 if example.main([1, 2, 4], steps=2) else 'the bits differ')\n"
    )
    done = ringattn(cwd=tmp_path, script=str(script))
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and len({line.split()[-1] for line in lines}) == 1
