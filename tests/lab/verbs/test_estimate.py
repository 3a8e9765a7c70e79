"""`ringattn estimate`: the numbers of the library, its defaults, and what has no meaning beside a model."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Inside

import ringattn as ra
from ringattn.cli.config.folders import verb_help
from ringattn.cli.config.groups import MachineGroup
from ringattn.errors import InvalidInput
from ringattn.lab.models.config import MODELS, load_model
from ringattn.lab.models.parallel import Parallel
from ringattn.lab.models.training import training_step
from ringattn.lab.verbs.estimate import main
from ringattn.lab.verbs.settings import EstimateConfig


def test_a_step_on_the_command_line(inside: Inside, tmp_path: Path) -> None:
    question = ("estimate", "model=llama3_8b", "tokens=64k", "cp=4", "dp=2", "tp=2")
    done = inside(*question, "--json")
    record = json.loads(done.stdout)
    parallel = Parallel(cp=4, dp=2, tp=2, layout="zigzag", schedule="auto")
    step = training_step(load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib"), 65536, parallel)
    assert (record["seconds"], record["memory"], record["mfu"]) == (step.seconds, step.memory, step.mfu)
    assert record["cost per 1e9 tokens"] == 2.5 * step.gpu_hours
    assert record["kWh per 1e9 tokens"] == pytest.approx(0.7 * step.gpu_hours)
    assert record["seconds with failures"] > record["seconds"] > record["seconds, band"][0]
    printed = inside(*question).stdout
    assert all(word in printed for word in ("[counted]", "[modelled]", "(MFU)", "memory of a GPU", "with failures"))
    assert max(map(len, printed.splitlines())) <= 120


def test_the_help_names_every_model() -> None:
    assert [name for name in MODELS if f" {name}," not in verb_help("estimate", [], [])] == []


def test_models_that_keep_latents_answer(inside: Inside, tmp_path: Path) -> None:
    for name, form in (("deepseek_v3", "latents"), ("kimi_k2", "latents"), ("glm5", "absorbed")):
        question = ("estimate", f"model={name}", "tokens=32k", "cp=4", "tp=8", "schedule=ring")
        record = json.loads(inside(*question, "ep=4", "--json").stdout)
        assert f", {form} (" in record["plan"] and record["model"]["latent"]["rank"] == 512
        assert "of each query chosen in" in record["plan"] or name != "glm5"
        kept = 576 + 128 * (name == "glm5")
        for phase in ("prefill", "decode"):
            served = json.loads(inside(*question, f"phase={phase}", "--json").stdout)
            assert served["memory"]["keys and values"] == record["model"]["layers"] * 8192 * 2 * kept


def test_jobs_of_models_are_points_of_a_study(inside: Inside, tmp_path: Path) -> None:
    done = inside("estimate", "-m", "model=llama3_8b,mistral_7b", "tokens=8k", "tp=2,8")
    header, *rows = (
        re.split(r" {2,}", line.strip()) for line in done.stdout.rpartition("\npoints [modelled]\n")[2].splitlines()
    )
    assert header == ["model", "tp", "time", "memory of a rank"]
    assert [row[:2] for row in rows[:4]] == [[name, tp] for name in ("llama3_8b", "mistral_7b") for tp in "28"]


def test_phases_and_configs_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    path = tmp_path / "my.json"
    path.write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 100}))
    own = EstimateConfig(tokens=1024, model=str(path), machine=MachineGroup("a100_nvlink_ib"))
    for group in (own.layout, own.schedule):
        group.spec = "auto"
    for phase, name in (("prefill", "time to first token"), ("decode", "time per token")):
        main(replace(own, phase=phase))
        printed = capsys.readouterr().out
        assert name in printed and "keys and values of a GPU  512.0 KiB" in printed
    for wrong, message in (
        ({"phase": "train"}, "did you mean 'training'"),
        ({"model": "file"}, "unknown model 'file'; expected llama3_8b"),
        ({"merge": "gather"}, "merge=gather has no meaning with phase=training"),
        ({"phase": "decode", "merge": "none"}, "merge=none: expected one of auto, gather, scatter"),
    ):
        with pytest.raises(InvalidInput, match=message):
            main(replace(own, **wrong))  # type: ignore[arg-type]
