"""The audit finds planted faults, hangs and crashes, and has nothing to say about what is right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import started
from faulty_rings import FAULTS

from ringattn import InvalidInput
from ringattn.lab.audit.cases import Case, list_cases
from ringattn.lab.audit.models import load_model
from ringattn.lab.audit.oracle import attend, make_inputs, see
from ringattn.lab.audit.run import audit, choose_cases, finish, load_target, work
from ringattn.lab.verbs.audit import main
from ringattn.transport.launcher import run_local

HELPERS = Path(__file__).parents[2] / "helpers"
RANKS = 3


def try_all(rank: int, names: list[str], features: list[list[str] | None], folder: str) -> None:
    """Audit one target after the other, on the same ranks."""
    for name, chosen in zip(names, features, strict=True):
        place = Path(folder, name.replace(":", "_"))
        place.mkdir(exist_ok=True)
        work(rank, name, choose_cases(RANKS, chosen), str(place), 20.0)


@pytest.mark.multi
def test_twelve_planted_faults_are_found_and_nothing_else(tmp_path: Path) -> None:
    """Each in its feature, with the rank and rows, and a smaller case whose script shows it without this library."""
    names = ["faulty_rings:attend", "ringattn", *(f"faulty_rings:fault_{i}" for i in range(len(FAULTS)))]
    most = [case.feature for case in list_cases(RANKS) if case.feature != "torch.compile"]
    features: list[list[str] | None] = [most, None, *([feature] for feature in FAULTS.values())]
    run_local(try_all, RANKS, names, features, str(tmp_path), timeout=110, threads=1)
    found = {
        name: [*finish(tmp_path / name.replace(":", "_"), RANKS, choose_cases(RANKS, chosen), name)]
        for name, chosen in zip(names, features, strict=True)
    }
    for name in names[:2]:
        wrong = [one for one in found[name] if one.verdict.verdict not in ("exact", "not offered", "refused")]
        assert not wrong, wrong
    refused = {one.case.feature for one in found["faulty_rings:attend"] if one.verdict.verdict == "refused"}
    assert refused == {"uneven length", "ranks without tokens", "ranks that differ"}
    assert [one.case.feature for one in found["ringattn"] if one.verdict.verdict == "refused"] == ["ranks that differ"]
    for i, fault in enumerate(FAULTS):
        (one,) = found[f"faulty_rings:fault_{i}"]
        assert one.verdict.verdict == "wrong", (fault, one)
    (lost,) = found["faulty_rings:fault_4"]
    assert lost.rank == RANKS - 1 and "of rows " in lost.verdict.why
    (small,) = found["faulty_rings:fault_0"]
    assert small.case.heads == small.case.kv_heads == 1 and small.case.tokens < 12 * RANKS


@pytest.mark.multi
def test_the_script_of_a_failure_shows_it_without_this_library(tmp_path: Path) -> None:
    (one,) = audit("faulty_rings:fault_0", 2, choose_cases(2, ["causal"]), 20.0)
    assert one.script and "ringattn" not in one.script and len(one.script.splitlines()) <= 24
    path = tmp_path / "small.py"
    path.write_text(one.script)
    errors = run_script(path)
    assert len(errors) == 8 and max(errors) > 0.1


def try_models(rank: int, targets: list[str], features: list[str] | None, folder: str) -> None:
    """Audit a model by one target after the other, on the same ranks."""
    for name in targets:
        place = Path(folder, name.replace(":", "_"))
        place.mkdir(exist_ok=True)
        work(rank, name, choose_cases(2, features, MODEL), str(place), 20.0, MODEL)


MODEL = "LlamaForCausalLM"


@pytest.mark.multi
def test_faults_of_parallelized_models_are_found_and_nothing_else(tmp_path: Path) -> None:
    faults = {"without_documents": "documents", "with_padding": "padding on the left"}
    faults["with_half_a_gradient"] = "bfloat16"
    targets = ["ringattn", "faulty_rings:run_model", *(f"faulty_rings:{name}" for name in faults)]
    run_local(try_models, 2, targets, [*faults.values(), "uneven length"], str(tmp_path), timeout=110, threads=1)
    cases = choose_cases(2, [*faults.values(), "uneven length"], MODEL)
    for name in targets:
        found = {one.case.feature: one for one in finish(tmp_path / name.replace(":", "_"), 2, cases, name, MODEL)}
        wrong = {feature for feature, one in found.items() if one.verdict.verdict != "exact"}
        fault = faults.get(name.removeprefix("faulty_rings:"))
        assert wrong == ({*found} if "half" in name else {fault} - {None}), (name, found)
        if fault == "documents":
            path = tmp_path / "small.py"
            path.write_text(found[fault].script)
            assert max(run_script(path)) > 0.01 and "ringattn" not in found[fault].script
        elif fault is not None and "half" in name:
            assert "the gradient of model." in found[fault].verdict.why


def run_script(path: Path) -> list[float]:
    """The errors that the script of a failure prints on two ranks."""
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(command, cwd=HELPERS, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"largest error[\w ]* (\d\.\de[+-]\d\d)", done.stdout)]


@pytest.mark.multi
def test_hangs_and_crashes_end_a_feature_and_not_the_audit() -> None:
    features = ["dense", "causal", "documents, not causal"]
    for target, verdict, why in (
        ("faulty_rings:hanging", "hang", "after rank 0: NotImplementedError: no causal mask here"),
        ("faulty_rings:dying", "crash", "a rank ended: "),
    ):
        found = [*audit(target, 2, choose_cases(2, features), 2.0)]
        assert [one.verdict.verdict for one in found] == ["exact", verdict, "not offered"], found
        assert why in found[1].verdict.why


@pytest.mark.multi
def test_the_audit_runs_on_the_ranks_of_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    words = ("audit", "features=[causal,documents]", "output.path=-")
    stale = tmp_path / "outputs/audit/2.jsonl"  # of an earlier audit
    stale.parent.mkdir(parents=True)
    stale.write_text('{"feature": "causal", "verdict": "wrong", "case": null}\n')
    record = json.loads(started(*words, cwd=tmp_path, launcher=torchrun).stdout)
    assert record["ranks"] == 3 and [one["feature"] for one in record["features"]] == ["causal", "documents"]
    assert {one["verdict"]["verdict"] for one in record["features"]} == {"exact"}


def test_the_oracle_is_that_of_torch() -> None:
    """Masks by loops over pairs, and torch's own attention of them."""
    for case in list_cases(2):
        if {"softcap", "sink_logits", "dropout"} & {*case.mask}:
            continue
        q, k, v, _ = make_inputs(case)
        mask: Any = case.mask
        starts = torch.tensor(mask.get("documents", (case.tokens,))).cumsum(0).tolist()
        for i in range(case.tokens):
            for j in range(case.tokens):
                seen = not mask.get("causal") or j <= i
                if "window" in mask:
                    seen = seen and (i - j <= mask["window"] or j < mask.get("sinks", 0))
                seen = seen and sum(i >= x for x in starts) == sum(j >= x for x in starts)
                seen = seen and j < case.tokens - mask.get("padding", 0)
                assert bool(see(case)[i, j]) == seen, (case, i, j)
        group = case.heads // case.kv_heads
        spread = (x.repeat_interleave(group, 1) for x in (k, v))
        exact = torch.nn.functional.scaled_dot_product_attention(
            q, *spread, attn_mask=see(case), scale=case.mask.get("scale")
        )
        assert (attend(case, q, k, v)[0] - exact).abs().max() < 1e-12


@pytest.mark.mpi
def test_the_audit_runs_under_mpirun_and_tells_what_hung(tmp_path: Path) -> None:
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "-n", "3", sys.executable, "-m", "ringattn", "audit"]
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    for words, status, shown in (
        (["features=[causal,documents]"], 0, r"causal +exact.*\ndocuments +exact"),
        (["faulty_rings:hanging", "features=[dense,causal,padding]", "patience=2"], 3, r"dense +exact.*\ncausal +hang"),
    ):
        done = subprocess.run(
            [*mpirun, *words], cwd=tmp_path, capture_output=True, text=True, timeout=100, env=environment, check=False
        )
        assert re.search(shown, done.stdout), done.stdout + done.stderr
        assert done.returncode == status and ("not tried: padding" in done.stderr) == bool(status)


def test_wrong_targets_and_features_are_told() -> None:
    with pytest.raises(InvalidInput, match=r"target=ringatn: did you mean 'ringattn'"):
        load_target("ringatn")
    with pytest.raises(InvalidInput, match=r"target=no_such_module:f: No module named"):
        load_target("no_such_module:f")
    with pytest.raises(InvalidInput, match=r"target=math:nothing: math has no function nothing"):
        load_target("math:nothing")
    with pytest.raises(InvalidInput, match="target=yunchang: "):
        load_target("yunchang", MODEL)
    with pytest.raises(InvalidInput, match="model=Llama: expected module:function, a class of transformers, or"):
        load_model("Llama")
    with pytest.raises(InvalidInput, match="features: windows: did you mean 'window'"):
        choose_cases(2, ["windows"])
    assert isinstance(choose_cases(2, ["window"])[0], Case) and callable(main)
