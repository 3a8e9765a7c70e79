"""ringattn run: attention over one input, timed, counted, and compared with the oracle."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config.schema import RunConfig
from ..errors import InvalidInput
from ..files import STDOUT, check_json, check_writable
from ..functional import ring_attention, virtual_attention
from ..reporting.console import console
from ..transport.base import Message, Post, Transport
from ..transport.launcher import detect
from ..transport.records import Exchange
from .effort import EACH, WAITED, check_effort
from .inputs import open_source, shards
from .progress import progress
from .ranks import check, device, start
from .run_job import Measured, Run, check_memory, plan_of, save
from .streamed import StreamedRun


def main(config: RunConfig) -> None:
    """Run on virtual ranks, as one rank of a launched job, or on local ranks started here."""
    check(config)
    for name, value, least in (("repeat", config.repeat, 1), ("sample", config.sample, 0)):
        if value < least:
            raise InvalidInput(f"{name}={value}: must be at least {least}")
    here, there = config.input.path, config.output.path
    if here and there and Path(here).resolve() == Path(there).resolve():
        raise InvalidInput(f"output.path={there} is the input, which would be lost; give another path")
    if there and Path(there).suffix != ".safetensors":
        raise InvalidInput(
            f"output.path={there}: safetensors is what is written; give a path that ends in .safetensors"
        )
    if config.output.report not in (None, STDOUT):
        for other in (here, there):
            if other and Path(other).resolve() == Path(config.output.report).resolve():
                raise InvalidInput(
                    f"output.report={config.output.report} is {other}, which would be lost; give another path"
                )
    single = f"stream={config.stream}" if config.stream else "transport=virtual" if _is_virtual(config) else None
    kind = detect().kind
    if single and kind != "none":
        raise InvalidInput(f"{single} is one process, not {kind}'s; start ringattn run without it")
    if config.stream is not None:
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        StreamedRun(config).run()
        return
    for name, given in (("chunk", config.chunk), ("device", config.device)):
        if given is not None:
            raise InvalidInput(f"{name}={given} is an option of stream=host and stream=disk; leave it out, or stream")
    if _is_virtual(config):
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        _Virtual(config).run()
    else:
        start(config, _worker, "run", _before)


def _is_virtual(config: RunConfig) -> bool:
    return config.transport.spec == "virtual"


def _before(config: RunConfig) -> None:
    plan = plan_of(
        config, open_source(config), config.ranks
    )  # what can be wrong is said here, once, before a rank starts
    check_memory(plan, plan.tokens)
    if config.output.path:
        check_writable(Path(config.output.path))
    check_json(config.output.report)


def _worker(config: RunConfig, transport: Transport) -> None:
    _Ranks(config, transport).run()


class _Virtual(Run):
    """All ranks in this process."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.ranks = config.ranks

    def open(self) -> None:
        self.make()
        passes = (self.config.repeat + 1) * (3 if self.config.backward else 1)
        if self.plan.tokens:
            shown = {0, self.ranks // 2, self.plan.layout.owner(self.plan.tokens // 2)}
            advice = "try fewer ranks, or ringattn simulate mode=numerics, which executes some rows"
            check_effort(self.plan, shown, self.ranks, EACH, WAITED, advice, passes)

    def rows(self) -> int:
        return self.plan.tokens

    def load(self) -> tuple[torch.Tensor, ...]:
        whole = range(self.plan.tokens)
        return tuple(self.source.rows(name, whole) for name in ("q", "k", "v"))

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        out, lse = virtual_attention(q, k, v, self.plan.pattern, ranks=self.ranks, **self.options())
        return out, lse

    def counted(self) -> int:
        return 0

    def collect(self, seen: Measured) -> list[Measured]:
        # Virtual messages are the planned ones, one for one: nothing is lost by counting them on the plan.
        seen.sent = {"forward": self.plan.bytes_sent(), "backward": self.plan.bytes_sent(backward=True)}
        return [seen]

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled(lambda x, top: None, np.arange(self.plan.tokens), out)

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        save(path, out, lse)

    def process(self, rank: int) -> str:
        return "of the process"


class _Watched:
    """A transport that moves a progress bar at every wait."""

    def __init__(self, inner: Transport, advance: Any) -> None:
        self._inner, self._advance = inner, advance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait(self, ticket: Any) -> None:
        self._inner.wait(ticket)
        self._advance()


class _Ranks(Run):
    """This process is one rank of a transport, which carries all that the ranks have to tell each other."""

    def __init__(self, config: RunConfig, transport: Transport) -> None:
        super().__init__(config)
        self.rank, self.ranks, self.transport = transport.rank, transport.size, transport
        self.device = device(config)

    def open(self) -> None:
        with Exchange(self.transport, "input"):
            self.make()

    def load(self) -> tuple[torch.Tensor, ...]:
        return shards(self.source, self.plan.layout, self.rank)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, Measured]:
        with self._progress():
            return super().measure()

    @contextmanager
    def _progress(self) -> Iterator[None]:
        self.watched: Any = self.transport
        if self.rank or self.config.progress is False:
            yield
            return
        mine = self.plan.for_rank(0)
        lists = [mine.forward, *([mine.backward] if self.config.backward else [])]
        waits = sum(len(step.posts) for steps in lists for step in steps)
        total, done = waits * (self.config.repeat + 1), count(1)
        with progress(console(), lines=self.config.progress is True) as tell:
            self.watched = _Watched(self.transport, lambda: tell(next(done), total, "steps"))
            yield

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        out, lse = ring_attention(q, k, v, self.plan.pattern, transport=self.watched, **self.options())
        return out, lse

    def barrier(self) -> None:
        self._everyone("barrier", b"")

    def counted(self) -> int:
        sent = self.transport.counters.sent_bytes
        self.transport.counters.reset()
        return sent

    def collect(self, seen: Measured) -> list[Measured]:
        return [pickle.loads(raw) for raw in self._everyone("measurements", pickle.dumps(seen))]

    def _everyone(self, stage: str, mine: bytes) -> list[bytes]:
        with Exchange(self.transport, stage) as told:
            told.mine = mine
        return told.records

    def _reduce(self, x: torch.Tensor, top: bool) -> None:
        raw = self._everyone("oracle", x.numpy().tobytes())
        parts = [torch.frombuffer(bytearray(part), dtype=x.dtype) for part in raw]
        every = torch.stack(parts).view(self.ranks, *x.shape)
        x.copy_(every.amax(0) if top else every.sum(0))

    def _move(self, x: torch.Tensor, peer: int, *, send: bool) -> None:
        if x.numel():
            message = (Message(peer, 0, x.view(-1).view(torch.uint8)),)
            post = Post(message, (), "output") if send else Post((), message, "output")
            self.transport.wait(self.transport.post(post))

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled(self._reduce, self.plan.layout.positions(self.rank), out)

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rank 0 gathers shard after shard; it holds the whole output, the others only theirs."""
        layout = self.plan.layout
        wholes = []
        for x in (out.contiguous(), lse.unsqueeze(-1).contiguous()):
            pieces = [x]
            if self.rank:
                self._move(x, 0, send=True)
                continue
            for rank in range(1, self.ranks):
                piece = x.new_empty((*x.shape[:2], layout.rows(rank), x.shape[3]))
                self._move(piece, rank, send=False)
                pieces.append(piece)
            wholes.append(layout.unshard_tensor(pieces).cpu())
        with Exchange(self.transport, "output"):
            if self.rank == 0:
                save(path, wholes[0], wholes[1].squeeze(-1))
