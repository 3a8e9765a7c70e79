"""launch/: the scripts run as they stand; what needs a cluster is read as its scheduler would read it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import TORCHRUN, Inside, ringattn
from safetensors.torch import load_file

from ringattn.cli.config.overrides import prepare

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
TINY = ("tokens=96", "heads=2", "head_dim=16", "repeat=1", "threads=1", "layout=striped")


def test_the_files_are_executable_and_pass_their_arguments_on() -> None:
    assert {path.name for path in LAUNCH.iterdir()} == {"torchrun.sh", "mpirun.sh", "slurm.sbatch", "trainjob.yaml"}
    for path in LAUNCH.iterdir():
        text = path.read_text()
        if path.suffix != ".yaml":
            assert os.access(path, os.X_OK)
            assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
            assert re.search(r'-m ringattn run (transport=\w+ )?"\$@"\n$', text)
            subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        pytest.param("torchrun.sh", "gloo", marks=pytest.mark.multi),
        pytest.param("mpirun.sh", "mpi", marks=pytest.mark.mpi),
    ],
)
def test_scripts_run(start: Callable[..., Any], inside: Inside, name: str, transport: str, tmp_path: Path) -> None:
    """Rank 0 alone writes and prints, and the result is that of virtual ranks."""
    # mpirun.sh takes the mpirun beside Python.
    env = {"PYTHON": sys.executable, "RANKS": "2"}
    common = (*TINY, "pattern=Causal() & Window(31)")
    done = start(
        [str(LAUNCH / name), *common, "backward=true", "output.path=x.safetensors"], cwd=tmp_path, env=env, timeout=90
    )
    assert done.returncode == 0 and (not done.stderr or transport == "gloo"), done.stderr
    assert f"(Causal() & Window(left=31, right=0)), 96 tokens, striped(1) on 2 {transport} ranks" in done.stdout
    assert done.stdout.count("forward time") == 1 and "NOT AS PLANNED" not in done.stdout
    assert len(list(tmp_path.glob("outputs/**/.hydra"))) == len(list(tmp_path.glob("outputs/run/*"))) == 1
    inside("run", *common, "transport=virtual", "ranks=2", "output.path=virtual.safetensors")
    found, wanted = (load_file(tmp_path / f"{made}.safetensors") for made in ("x", "virtual"))
    assert all(torch.equal(found[key], wanted[key]) for key in ("out", "lse"))


#: A call with a wrong file, and one that fails.
BROKEN = """
import sys
import ringattn.cli.run as command
from ringattn.cli.main import main

sys.argv[1:] = ["run", "input=file", "input.path=cut.safetensors"]
try:
    main()
except SystemExit as end:
    assert end.code == 2

def bad_day(config, transport, plan=None):
    raise ArithmeticError("a bad day on every rank")

command._worker = bad_day
sys.argv[1:] = ["run", "tokens=64"]
main()
"""


@pytest.mark.multi
def test_torchrun_shows_the_traceback(tmp_path: Path) -> None:
    """What torchrun prints of a rank that failed, which without `@record` is a link to its manual."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "cut.safetensors").write_bytes(b"12345678901234567890")
    words = ("--standalone", "--nproc-per-node=1", "broken.py")
    done = ringattn(*words, cwd=tmp_path, script=TORCHRUN, status=1)
    assert "ringattn: " in done.stderr and "not a complete safetensors file" in done.stderr
    summary = done.stderr.split("Root Cause")[-1]
    assert 'raise ArithmeticError("a bad day on every rank")' in summary and "in bad_day" in summary


@pytest.mark.multi
def test_the_program_that_proves_rings_of_ranks(tmp_path: Path) -> None:
    """What `scripts/gpu` runs on NCCL, on Gloo in its place."""
    program = str(Path(__file__).parents[1] / "helpers" / "ring_ranks.py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def run(rank: int) -> str:
        return ringattn("gloo", cwd=tmp_path, script=program, RANK=str(rank), **place).stdout

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(run, range(2))
    assert first.count("2 ranks on gloo: ") == 4


def test_without_a_gpu_the_last_line_says_what_nccl_needs(start: Callable[..., Any]) -> None:
    command = [str(LAUNCH / "torchrun.sh"), "tokens=64", "transport=nccl"]
    done = start(command, env={"PYTHON": sys.executable}, timeout=60)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "transport=nccl needs a CUDA device, but this rank sees none" in line


def test_torchrun_on_many_nodes_asks_for_their_place(start: Callable[..., Any]) -> None:
    done = start([str(LAUNCH / "torchrun.sh")], env={"NODES": "2"}, timeout=10)
    assert done.returncode != 0 and "NODES > 1 needs HEAD=host:port of the first node" in done.stderr


@pytest.mark.parametrize("name", ["torchrun.sh", "mpirun.sh", "slurm.sbatch"])
@pytest.mark.parametrize("ranks", ["x", "0", "-1", "2.5"])
def test_ranks_that_are_no_number_are_refused(start: Callable[..., Any], name: str, ranks: str) -> None:
    done = start([str(LAUNCH / name)], env={"RANKS": ranks}, timeout=10)
    assert done.returncode == 2 and f"RANKS={ranks} is not a number of ranks; try RANKS=" in done.stderr


def test_slurm_starts_one_torchrun_per_node() -> None:
    text = (LAUNCH / "slurm.sbatch").read_text()
    lines = text.splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH"))
    assert options["ntasks-per-node"] == "1" and options["nodes"].isdigit() and options["gpus-per-node"].isdigit()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", options["time"])
    assert not {"partition", "account", "mail-user"} & set(options), "site names do not belong here"
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last]), "sbatch stops reading at the first command"
    for words in ("scontrol show hostnames", "--nnodes", "--rdzv-backend c10d", '--rdzv-endpoint "$head:$port"'):
        assert words in text


def test_slurm_script_starts_ranks_with_stand_ins(start: Callable[..., Any], tmp_path: Path) -> None:
    """srun and scontrol are stand-ins of one node, this one; what srun starts is real up to torchrun's arguments."""
    for name, body in (
        ("srun", 'shift; printf "%s\\n" "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS" "$@"'),
        ("scontrol", "printf 'first\\nsecond\\n'"),
    ):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "first,second", "SLURM_GPUS_ON_NODE": "4", "PYTHON": "python",
        "SLURM_CPUS_PER_TASK": "32", "OMP_NUM_THREADS": "",
    }  # fmt: skip
    done = start([str(LAUNCH / "slurm.sbatch"), "tokens=1M", "pattern=Causal() & Window(31)"], env=env, timeout=20)
    assert done.returncode == 0, done.stderr
    cpus, *words = done.stdout.splitlines()
    assert cpus == "32 8", "srun is told the cores of the node, and the ranks share them"
    from torch.distributed.run import get_args_parser

    assert words[:3] == ["python", "-m", "torch.distributed.run"]
    found = get_args_parser().parse_args(words[3:])
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend) == ("2", "4", "c10d")
    assert (found.rdzv_id, found.rdzv_endpoint) == ("123456", "first:23456")
    assert (found.module, found.training_script) == (True, "ringattn")
    assert found.training_script_args == ["run", "transport=nccl", "tokens=1M", "pattern=Causal() & Window(31)"]


def test_trainjob_has_the_fields_of_its_schema() -> None:
    job = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and job["kind"] == "TrainJob"
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"} and set(job["metadata"]) & {"name", "generateName"}
    assert set(job["spec"]) == {"runtimeRef", "trainer", "podTemplateOverrides"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) == {"image", "numNodes", "numProcPerNode", "command", "args", "env", "resourcesPerNode"}
    assert isinstance(trainer["numNodes"], int) and isinstance(trainer["numProcPerNode"], int)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert trainer["command"] == ["torchrun", "-m", "ringattn", "run"]
    assert all(isinstance(word, str) for word in trainer["args"])
    prepare("run", trainer["args"])
    assert {entry["name"] for entry in trainer["env"]} == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
    assert all("GLOO_SOCKET_IFNAME" in (LAUNCH / name).read_text() for name in ("torchrun.sh", "slurm.sbatch"))
    (override,) = job["spec"]["podTemplateOverrides"]
    (container,), (volume,) = override["spec"]["containers"], override["spec"]["volumes"]
    assert override["targetJobs"] == [{"name": "node"}] and container["name"] == "node"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
