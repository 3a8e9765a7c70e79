"""Calibration and validation from end to end, with tiny sizes: what comes out is whole and can be used. No times."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Inside, Refused, ringattn

import ringattn as ra
from ringattn.cli.config.groups import ConfigGroup, MachineGroup, OutputGroup, TransportGroup
from ringattn.errors import InvalidInput
from ringattn.lab.verbs.calibrate import main as calibrate
from ringattn.lab.verbs.settings import CalibrateConfig
from ringattn.machine.file import read_machine

CALLS = ("call", "sweep", "call_backward", "sweep_backward")
SIZES = ("rows=[16,64]", "widths=[8]", "repeat=2", "heads=2", "head_dim=16")
MESSAGES = "messages=[256,32M]"


def check(path: Path, ranks: int, *, alone: bool = False) -> ra.Machine:
    """A machine file holds every number with its source, and samples of every rank behind each."""
    record, machine = yaml.safe_load(path.read_text()), read_machine(path)
    assert {"cpu", "torch", "date", "commit", "transport", "threads"} <= set(record["made"])
    measured = ["flops", "merge", *([] if alone else ["latency", "bandwidth", "gamma", *CALLS])]
    assert [machine.source(name) for name in measured] == ["measured"] * len(measured)
    assert all({"value", "unit", "source"} == set(entry) for entry in record["values"].values())
    samples = record["samples"]
    assert len(samples["works"]) == 2 * (4 + 2 + 2 + 2)  # dense, ragged, triangles, bands
    assert all(len(one["seconds"]) % ranks == 0 and len(one["seconds"]) >= 2 * ranks for one in samples["works"])
    if not alone:
        assert [one["bytes"] for one in samples["shifts"]] == [256, 32 << 20]
        assert len(samples["passes"]) == 8 and len(machine.residuals) == 8 * 2
        assert [one["rows"] for one in samples["overlaps"]] == [16, 64]
        assert all(len(one["visit"]) == len(one["both"]) >= 2 * ranks for one in samples["overlaps"])
        assert all(len(one["visit"]) == ranks * len(one["message"]) for one in samples["overlaps"]), "the last to come"
    plan = ra.make_plan(ra.Causal(), tokens=128, ranks=2, layout="zigzag", schedule="ring", heads=2, head_dim=16)
    assert ra.simulate(plan, machine).seconds > 0
    return machine


@pytest.mark.multi
def test_two_gloo_ranks_make_a_machine_that_plan_and_simulate_use(
    inside: Inside, refused: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "m.yaml"
    done = ringattn("calibrate", *SIZES, MESSAGES, f"output.path={path}", "machine.watts=5", cwd=tmp_path)
    assert "[measured]" in done.stdout and f"machine=file machine.path={path}" in done.stdout
    machine = check(path, 2)
    assert machine.watts == 5.0 and machine.source("watts") == "assumed"
    assert (machine.ranks_per_node, machine.shared_nic) == (1, False), "one node"
    sources = [machine.source(name) for name in ("ranks_per_node", "shared_nic", "bandwidth")]
    assert sources == ["assumed", "assumed", "measured"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.yaml"], "nothing else is left behind"
    file = ("machine=file", f"machine.path={path}", "heads=2", "head_dim=16", "tokens=128", "ranks=2")
    inside("plan", "schedule=auto", *file)
    assert "measured" in inside("simulate", *file).stdout
    far = ("simulate", *file[:4], "tokens=4k", "ranks=2")
    assert "machine.extrapolate=true" in refused(*far)
    inside(*far, "machine.extrapolate=true")


def test_one_process_alone_measures_kernels(inside: Inside, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    options = ("transport=none", "threads=1", *SIZES, f"output.path={path}", "machine=h100_nvlink_ib")
    inside("calibrate", *options)
    machine = check(path, 1, alone=True)
    preset = ra.get_machine("h100_nvlink_ib")
    same = [(x.bandwidth, x.source("bandwidth")) for x in (machine, preset)]
    assert same[0] == same[1], "what is not measured is the preset's"


def test_an_interrupted_calibration_keeps_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    words = ("transport=none", "threads=1", *SIZES[:2], "repeat=100000", *SIZES[3:], f"output.path={path}")
    command = [sys.executable, "-m", "ringattn", "calibrate", *words]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # jobs in the background ignore it
    ) as process:
        deadline = time.monotonic() + 90
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "ringattn: interrupted\n")
    assert out.startswith("measuring round 1 of 100000; a round can take minutes\n")
    check(path, 1, alone=True)
    assert yaml.safe_load(path.read_text())["made"]["rounds"] >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": [64]}, "expected at least 2 ascending sizes"),
        ({"output": OutputGroup(None)}, "output.path is missing"),
        ({"transport": TransportGroup("virtual")}, "expected one of gloo, nccl, mpi, none"),
        ({"transport": TransportGroup("nccl")}, "needs a CUDA device, but this|-m ringattn calibrate"),
        ({"transport": TransportGroup("mpi")}, "mpirun -n 2 ringattn calibrate"),
        ({"device": "cuda"}, "device=cuda: transport=gloo is measured on CPUs"),
    ],
)
def test_wrong_calls_are_told_at_once(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    given = {"transport": TransportGroup("gloo"), "output": OutputGroup(str(tmp_path / "m.yaml")), **change}
    with pytest.raises(InvalidInput, match=words):
        calibrate(CalibrateConfig(kernel=ConfigGroup("auto"), machine=MachineGroup("auto"), **given))
    assert not list(tmp_path.iterdir())
