"""The questions of docs/cluster.md: each has an answer that says what it rests on, and commands that parse.

`RINGATTN_EVERY_COMMAND=1 scripts/test tests/lab/advise/test_questions.py -s -n 0` prints all answers, in minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import read_server, read_torchtitan

PAGE = (Path(__file__).parents[3] / "docs/cluster.md").read_text().replace("\\\n", "")
#: The commands of the page's section.
QUESTIONS = re.findall(r"(?m)^ringattn (.*)$", PAGE.partition("## Sixteen questions")[2].partition("\n## ")[0])
#: Those that take few seconds.
QUICK = ("llama3_8b tokens=32k gpus=8 machine=b200", "rtx4090", "gpt_oss_120b", "deepseek_v3 tokens=128k batch")


def test_there_are_sixteen() -> None:
    assert len({*QUESTIONS}) == 16 and all(any(name in one for one in QUESTIONS) for name in QUICK)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_have_answers(question: str, inside: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    if not any(name in question for name in QUICK) and "RINGATTN_EVERY_COMMAND" not in os.environ:
        pytest.skip("takes long; RINGATTN_EVERY_COMMAND=1 runs it")
    told = inside(question).stdout
    print(f"\nringattn {question}\n{told}")
    said = " ".join(told.replace(" \\\n", " ").split())
    commands = [line for line in re.split(r" (?=launch: |note: )", said) if line.startswith("launch: ")]
    if "phase=" in question:
        assert "1e6 tokens [modelled]" in said and " kWh" in said and "attention at the rate of " in said
        assert all(re.search(f"- With [0-9,]+ {name} it takes ", said) for name in ("sequences", "tokens"))
        assert len(commands) == 2 and all(read_server(line.removeprefix("launch: ")) for line in commands)
        return
    assert re.match(r"(Fastest|Cheapest) for ", said) and "attention by " in said and "how sure: " in said
    assert all(f"- {name}: " in said for name in ("Batch" if "batch=" not in question else "Tokens", "Memory", "Price"))
    assert len(commands) == 1 or "train with ringattn.train" in said
    assert all(read_torchtitan(line.removeprefix("launch: ")) for line in commands)
