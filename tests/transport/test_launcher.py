"""The launcher: results in order, failures told with their reason, no process left behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing import active_children, get_context
from typing import Any

import pytest
import rank_cases
import torch
import torch.distributed as dist

from ringattn.cli import ranks
from ringattn.cli.config.groups import TransportGroup
from ringattn.cli.config.schema import RunConfig
from ringattn.cli.ranks import _set_cuda_device
from ringattn.errors import InvalidInput, LaunchFailure
from ringattn.transport import launcher
from ringattn.transport.launcher import Launch, detect, init_process_group

Run = Callable[..., list[Any]]
multi = pytest.mark.multi


@multi
@pytest.mark.usefixtures("cold_ranks")
def test_results_come_in_rank_order(new_ranks: Run) -> None:
    assert new_ranks(rank_cases.fail, 2, "not") == [f"rank {rank} of 2, 1 threads" for rank in range(2)]
    assert active_children() == []


@multi
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 of 2 exited with status 1", "ValueError: a bad day on rank one"]),
        ("kill", ["rank 1 of 2 was killed by SIGKILL"]),
        ("hang", ["did not end within 5 s", "rank 1 still ran", "about to hang"]),
    ],
)
def test_a_failing_rank_is_named(new_ranks: Run, how: str, words: list[str]) -> None:
    start = time.monotonic()
    with pytest.raises(LaunchFailure) as caught:
        new_ranks(rank_cases.fail, 2, how, timeout=5 if how == "hang" else 80)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert time.monotonic() - start < 90
    assert active_children() == []


def start_ranks(folder: str) -> None:
    """Start two ranks, one of which hangs, with temporary files in `folder`."""
    tempfile.tempdir = folder
    launcher.get_context = lambda method: get_context("fork")  # type: ignore[assignment]
    launcher.run_local(rank_cases.fail, 2, "hang", timeout=150)


@multi
def test_ranks_die_with_their_parent(tmp_path: Any) -> None:
    """The parent is killed with SIGKILL while its ranks sleep. Its temporary folder goes, too."""
    (temporary := tmp_path / "tmp").mkdir()
    parent = get_context("forkserver").Process(target=start_ranks, args=(str(temporary),))
    parent.start()
    deadline = time.monotonic() + 90
    while not any("about to hang" in log.read_text() for log in temporary.glob("ringattn-*/rank_0001.log")):
        assert time.monotonic() < deadline and parent.is_alive()
        time.sleep(0.1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True).stdout
    assert list(temporary.glob("ringattn-*"))
    parent.kill()
    parent.join()
    time.sleep(1.0)
    assert not list(temporary.glob("ringattn-*"))
    for pid in children.split():
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
        assert state[:1] in ("", "Z"), f"process {pid} is left behind in state {state}"


def meet(rank: int, port: int, restarts: int) -> None:
    """A rank that torchrun started, `restarts` restarts after the first time, meets the other and leaves."""
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": restarts}
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**agent, **place}.items()})
    init_process_group(detect(), backend="gloo", timeout=30)
    dist.barrier()
    os._exit(5)


@multi
def test_ranks_meet_again_after_a_restart() -> None:
    """The store, which is torchrun's, still says where the ranks were before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restarts in range(2):
        context = get_context("forkserver")
        processes = [context.Process(target=meet, args=(rank, store.port, restarts)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [5, 5]


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch("none")),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch("torchrun", 3, 8, 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launch("openmpi", 1, 2, 0, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}, Launch("mpich", 1, 4, 1, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}, Launch("slurm", 2, 4, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Launch("none")),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"},
            Launch("mpich", 3, 4, 1, 1),
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("mpich", 1, 2, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "RANK": "1", "WORLD_SIZE": "2"}, Launch("torchrun", 1, 2, 0, 1)),
    ],
)
def test_detect(env: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", env)
    assert detect() == launch


def test_detect_names_the_bad_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "one", "WORLD_SIZE": "2"})
    with pytest.raises(InvalidInput, match="RANK='one'"):
        detect()


@pytest.mark.parametrize(("local_rank", "devices", "expected"), [(3, 8, 3), (3, 1, 0), (5, 4, 1)])
def test_a_rank_takes_a_device_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, devices: int, expected: int
) -> None:
    """Some launchers show each rank only its own device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch = Launch("torchrun", rank=local_rank, world=8, local_rank=local_rank, local_world=8)
    assert _set_cuda_device(launch, "transport=nccl").index == expected
    assert chosen == [torch.device("cuda", expected)]


def test_a_rank_has_its_device_before_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL then connects the devices at once, and no rank takes the memory of the first device."""
    order: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", order.append)
    monkeypatch.setattr(ranks, "init_process_group", lambda launch, **options: order.append(options))
    monkeypatch.setattr(ranks, "TorchDist", lambda timeout: order.append("transport"))
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: None)
    launch, device = Launch("torchrun", rank=3, world=4, local_rank=3, local_world=4), torch.device("cuda", 3)
    config = RunConfig(transport=TransportGroup("nccl"), threads=torch.get_num_threads())
    ranks._run_under_torchrun(launch, config, lambda config, transport: {})
    assert order == [device, {"backend": "nccl", "timeout": config.timeout, "device": device}, "transport"]
