"""Calls that ranks compare beside their messages: no rank waits, no wrong number is used, every fault is named."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import told_by

import ringattn as ra
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.transport import channel, comparison

ROWS = 24
#: Seconds after which a group gives up, and where a rank stays away.
PATIENCE, LATE = 60.0, 3.0
Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi


class Steps:
    """One rank's attention over a group: forwards and backwards of `ROWS` rows."""

    def __init__(self, mode: str, group: Any = None, grace: float = PATIENCE) -> None:
        self.rank, self.size, self.group = dist.get_rank(), dist.get_world_size(), group
        self.layout = ra.make_layout("contiguous", tokens=ROWS * self.size, ranks=self.size)
        self.options: dict[str, Any] = {"layout": self.layout, "group": group, "check": mode}
        self.inputs = [self.made(self.rank, name).requires_grad_() for name in range(3)]
        # Ranks that are alive answer at once, but on a busy machine their threads may sleep for longer than `GRACE`.
        comparison.GRACE = channel.GRACE = grace

    @staticmethod
    def made(rank: int, name: int) -> torch.Tensor:
        return torch.randn(1, 2, ROWS, 8, generator=torch.Generator().manual_seed(3 * rank + name))

    def forward(self, pattern: ra.Pattern | None = None, **options: Any) -> torch.Tensor:
        out: torch.Tensor = ra.ring_attention(*self.inputs, pattern or ra.Causal(), **{**self.options, **options})
        return out

    def step(self, pattern: ra.Pattern | None = None, **options: Any) -> None:
        self.forward(pattern, **options).sum().backward()

    def end(self) -> None:
        ra.synchronize(self.group)

    def wait_for(self, ranks: int) -> None:
        """Wait for so many ranks to `meet`. Gloo would spin in a rank that computes or sleeps while another waits."""
        store = dist.distributed_c10d._get_default_store()
        while store.add(self.group.group_name, 0) < ranks:
            time.sleep(0.01)

    def meet(self) -> None:
        dist.distributed_c10d._get_default_store().add(self.group.group_name, 1)
        self.wait_for(self.size)


def broken(*arguments: Any, **more: Any) -> Any:
    raise MemoryError("no room")


def raise_before(steps: Steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ra.call.functional, "compile_call", broken)
        steps.step()


def raise_after(steps: Steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AtenCpu, "forward", broken)
        steps.step()


def swap(steps: Steps) -> None:
    """The backwards of two calls in the other order."""
    first, second = steps.forward(), steps.forward(ra.Full())
    second.sum().backward()
    first.sum().backward()


def straight(steps: Steps) -> None:
    first, second = steps.forward(), steps.forward(ra.Full())
    first.sum().backward()
    second.sum().backward()


def skip(steps: Steps) -> None:
    """One of two equal calls too few."""
    steps.step()


def twice(steps: Steps) -> None:
    steps.step()
    steps.step()


def leave(steps: Steps) -> None:
    """No backward after the forward: the next step instead."""
    steps.forward()
    steps.step()


def late(steps: Steps) -> None:
    """No call before the others have been told."""
    steps.wait_for(steps.size - 1)


#: What the odd rank does, what the others do, and what each error says.
FAULTS: dict[str, tuple[Callable[[Steps], None], Callable[[Steps], None], str]] = {
    "pattern": (lambda s: s.step(ra.Full()), lambda s: s.step(), "the ranks disagree about pattern"),
    "scale": (lambda s: s.step(scale=0.5), lambda s: s.step(), "the ranks disagree about scale"),
    "documents": (
        lambda s: s.step(ra.Documents([5, ROWS * s.size - 5])),
        lambda s: s.step(ra.Documents([6, ROWS * s.size - 6])),
        "the ranks disagree about pattern",
    ),
    "order": (swap, straight, "disagree about|different calls"),
    "skipped": (skip, twice, "disagree about call|at stage|synchronize"),
    "no backward": (leave, twice, "disagree about call|at stage"),
    "before": (raise_before, lambda s: s.step(), "it raised MemoryError: no room|MemoryError"),
    "after": (raise_after, lambda s: s.step(), "it raised MemoryError: no room|MemoryError"),
    "late": (late, lambda s: s.step(), "has not joined the call"),
}


def faults(rank: int, mode: str, odd: int) -> dict[str, str]:
    """What each rank is told of each fault of rank `odd`."""
    told = {}
    for name, (wrong, right, _) in FAULTS.items():
        is_late = name == "late" or (name == "skipped" and mode == "now")
        steps = Steps(mode, dist.new_group(timeout=timedelta(seconds=LATE if is_late else PATIENCE)))
        steps.step()
        steps.end()
        dist.barrier()

        def run(steps: Steps = steps, work: Callable[[Steps], None] = wrong if rank == odd else right) -> None:
            work(steps)
            steps.step()
            steps.end()

        told[name] = told_by(run)
        steps.meet()
    return told


@pytest.mark.parametrize(("odd", "mode"), [(0, "now"), (1, "deferred")])
def test_every_fault_is_an_error_on_every_rank(run_ranks: Run, odd: int, mode: str) -> None:
    for rank, told in enumerate(run_ranks(faults, 3, mode, odd, timeout=150)):
        for name, (_, _, words) in FAULTS.items():
            text = told[name]
            if mode == "now" and name == "skipped":  # nobody calls again, so that only time tells
                assert text == "fine" if rank == odd else f"rank {odd} has not joined the call" in text, (name, text)
                continue
            assert re.search(words, text), (name, rank, text)
            assert rank == odd or f"rank {odd}" in text or f"ranks {odd}" in text or name == "order", (name, text)


def gone(rank: int, folder: str, mode: str, how: int) -> None:
    """Rank 1 is killed, or stopped; each other rank writes what it is told."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    steps = Steps(mode, group, comparison.GRACE)  # a rank that is stopped never answers
    steps.step()
    steps.end()
    (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), how)
    # On a busy machine, Gloo may notice the end of a rank before the thread that compares calls does.
    with channel.get_channel(group, 1.0)._changed if rank == 2 and how == signal.SIGKILL else nullcontext():
        time.sleep(0.5)
        told = told_by(lambda: [steps.step() for _ in range(3)])
    (Path(folder) / f"rank{rank}").write_text(told)
    if how == signal.SIGSTOP and rank == 0:
        while not (Path(folder) / "rank2").exists():
            time.sleep(0.05)
        os.kill(int((Path(folder) / "pid1").read_text()), signal.SIGKILL)


# A rank that is stopped is, to mode "now", one that is late.
@pytest.mark.parametrize(
    ("how", "mode"), [(signal.SIGKILL, "now"), (signal.SIGKILL, "deferred"), (signal.SIGSTOP, "deferred")]
)
def test_a_rank_that_is_killed_or_stopped_is_named(new_ranks: Run, tmp_path: Path, how: int, mode: str) -> None:
    with pytest.raises(ra.CommFailure, match="rank 1 of 3 was killed by SIGKILL"):
        new_ranks(gone, 3, str(tmp_path), mode, int(how), timeout=60)
    for rank in (0, 2):
        assert ("rank 1 is gone" if how == signal.SIGKILL else "rank 1 does not answer") in (
            text := (tmp_path / f"rank{rank}").read_text()
        ), text


def ahead(rank: int, apart: list[int]) -> tuple[int, int, list[int]]:
    """Rank 1 begins its calls after the others have made theirs; waits and frames of a warm forward and backward."""
    steps, pattern = Steps("deferred", dist.new_group()), ra.Documents(apart)
    steps.step(pattern)
    steps.end()
    if rank == 1:
        dist.barrier()
    for _ in range(4):
        steps.step(pattern)
    if rank != 1:
        dist.barrier()
    steps.end()
    found, waits = channel.get_channel(steps.group, 1.0), list[object]()
    frames, lengths = list[int](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_wait", lambda *given: waits.append(given))
        send, flush = found.comparison._send, found._flush
        patch.setattr(found.comparison, "_send", lambda peer, frame: (frames.append(peer), send(peer, frame)))
        patch.setattr(found, "_flush", lambda peer: (lengths.append(len(found._waiting[peer])), flush(peer)))
        steps.step(pattern)
    steps.end()
    return len(waits), len(frames), lengths


def test_ranks_are_ahead_of_a_rank_that_is_late(run_ranks: Run) -> None:
    for waits, frames, lengths in run_ranks(ahead, 3, [ROWS] * 3, timeout=60):
        assert waits == 0 and frames == 2 and max(lengths) <= 64


def steps_of_an_optimizer(rank: int) -> tuple[str, bool, str]:
    """With another scale on rank 1, which no message shows: what a step, and a call without gradients, is told."""
    apart = ra.Documents([ROWS] * dist.get_world_size())
    options = {"scale": 0.5} if rank == 1 else {}
    steps = Steps("deferred", dist.new_group())
    before = steps.inputs[0].detach().clone()
    optimizer = torch.optim.SGD(steps.inputs, lr=1.0)
    text = told_by(lambda: (steps.step(apart, **options), optimizer.step()))  # a slow rank is told in its step
    untouched = torch.equal(before, steps.inputs[0])
    steps = Steps("deferred", dist.new_group())
    with torch.no_grad():
        return text, untouched, told_by(lambda: steps.forward(apart, **options))


def test_no_wrong_number_is_used(run_ranks: Run) -> None:
    for text, untouched, inference in run_ranks(steps_of_an_optimizer, 3, timeout=60):
        assert "the ranks disagree about scale" in text and "the ranks disagree about scale" in inference
        assert untouched


PATTERNS = (ra.Causal(), ra.Full(), ra.Causal() & ra.Window(5), ra.Documents([ROWS] * 3))


def sequences(rank: int, first: int, last: int) -> tuple[int, int]:
    """Random calls with each fault on a random rank: how many sequences ended in an error here, and calls that ended.

    Whatever a rank may use is compared with all ranks in one process: all of it in mode "now"; what was synchronized in
    mode "deferred".
    """
    failed = used = 0
    for seed in range(first, last):
        same = random.Random(seed)
        odd, at = same.randrange(3), same.randrange(6)
        mode = ("now", "deferred")[seed % 2]
        fault = ("scale", "pattern", "skip", "raise", "raise late", "none")[seed // 2 % 6]
        seconds = LATE if fault == "skip" else PATIENCE
        steps = Steps(mode, dist.new_group(timeout=timedelta(seconds=seconds)))
        whole = [torch.cat([Steps.made(other, name) for other in range(3)], 2) for name in range(3)]

        def run() -> None:
            nonlocal used
            for number in range(6):
                pattern, grad, scale = same.choice(PATTERNS), same.random() < 0.6, same.choice((0.3, 0.5))
                wanted = ra.virtual_attention(*whole, pattern, ranks=3, layout="contiguous", scale=scale)
                mine = steps.layout.shard_tensor(wanted, rank)
                here = number == at and rank == odd
                if here and fault == "skip":
                    continue
                with pytest.MonkeyPatch.context() as patch:
                    if here and fault == "raise":
                        patch.setattr(ra.call.functional, "compile_call", broken)
                    if here and fault == "raise late":
                        patch.setattr(AtenCpu, "forward", broken)
                    if here and fault == "scale":
                        scale = 0.7
                    if here and fault == "pattern":
                        pattern = ra.Full() & ra.Window(3, 3)
                    with torch.set_grad_enabled(grad):
                        out = steps.forward(pattern, scale=scale)
                        if grad:
                            out.sum().backward()
                if mode == "deferred":
                    steps.end()
                assert here or torch.equal(out, mine), (seed, number)
                used += 1
            steps.end()

        failed += told_by(run) != "fine"
        steps.meet()
    return failed, used


def test_random_sequences_with_faults(run_ranks: Run) -> None:
    """No rank uses a wrong number, and none hangs; a script has run 300 of them."""
    told = run_ranks(sequences, 3, 0, 12, timeout=150)
    assert all(failed == 10 and used > 25 for failed, used in told), told
