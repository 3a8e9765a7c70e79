"""Planning where numpy's default integer has 32 bits, as in a browser: the answers equal ours digit for digit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import narrow

from ringattn.lab.play.page import EXAMPLES

CAUSAL = EXAMPLES["Causal"]
SETTINGS = [
    *(EXAMPLES[name] for name in ("Causal", "Window", "Packed", "Two nodes")),
    {**EXAMPLES["64 ranks"], "ranks": "24", "tokens": "3M"},
    {**CAUSAL, "tokens": "8k", "layout": "striped(64)", "schedule": "ulysses(4, direct)"},
    {**CAUSAL, "pattern": "Dilated((2048, 8192, 65536), (1, 4, 16))", "schedule": "direct", "ranks": "4"},
    {**CAUSAL, "layout": "auto", "schedule": "auto", "ranks": "4"},
    {**CAUSAL, "tokens": "1G", "layout": "contiguous", "pattern": "Causal() & Window(1_000_000)"},
    {**CAUSAL, "tokens": "1G"},
]


def test_plans_are_the_same_with_integers_of_32_bits() -> None:
    answers = []
    for kind in ("native", "narrow"):
        done = subprocess.run(
            [sys.executable, str(Path(narrow.__file__)), kind],
            input=json.dumps(SETTINGS),
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert not done.returncode, done.stderr
        answers.append(done.stdout.splitlines())
    assert len(answers[0]) == len(SETTINGS)
    for settings, native, found in zip(SETTINGS, *answers, strict=True):
        assert native == found, settings
