"""ringattn run: attention over one input, timed, counted, and compared with the oracle."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import RunConfig
from ..data import open_source, shards
from ..errors import InvalidInput, Mismatch, RingAttentionError
from ..files import check_writable
from ..functional import ring_attention, virtual_attention
from ..job import Measured, Run, check_memory, plan_of, save
from ..launcher import detect
from ..report import console
from ..transport.base import Message, Post, Transport
from .effort import EACH, WAITED, check_effort
from .progress import progress
from .ranks import check, device, start
from .streamed import Streamed


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
    single = f"stream={config.stream}" if config.stream else "transport=virtual" if _is_virtual(config) else None
    kind = detect().kind
    if single and kind != "none":
        raise InvalidInput(f"{single} is one process, not {kind}'s; start ringattn run without it")
    if config.stream is not None:
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        Streamed(config).run()
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
        error: RingAttentionError | None = None
        try:
            self.make()
        except RingAttentionError as caught:
            error = caught
        told = self.transport.gather(json.dumps(str(error)[:1500] if error else None).encode())
        if error is not None:
            raise error
        for rank, text in enumerate(map(json.loads, told)):
            if text is not None:
                raise Mismatch(f"rank {rank} cannot take part: {text}")

    def load(self) -> tuple[torch.Tensor, ...]:
        return shards(self.source, self.plan.layout, self.rank)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, Measured]:
        with self._progress():
            return super().measure()

    @contextmanager
    def _progress(self) -> Iterator[None]:
        wanted = sys.stdout.isatty() if self.config.progress is None else self.config.progress
        self.watched: Any = self.transport
        if self.rank or not wanted:
            yield
            return
        mine = self.plan.for_rank(0)
        lists = [mine.forward, *([mine.backward] if self.config.backward else [])]
        waits = sum(len(step.posts) for steps in lists for step in steps)
        total, done = waits * (self.config.repeat + 1), count(1)
        with progress(console(), lines=True) as tell:
            self.watched = _Watched(self.transport, lambda: tell(next(done), total, "steps"))
            yield

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        out, lse = ring_attention(q, k, v, self.plan.pattern, transport=self.watched, **self.options())
        return out, lse

    def barrier(self) -> None:
        self.transport.gather(b"")

    def counted(self) -> int:
        sent = self.transport.counters.sent_bytes
        self.transport.counters.reset()
        return sent

    def collect(self, seen: Measured) -> list[Measured]:
        return [pickle.loads(raw) for raw in self.transport.gather(pickle.dumps(seen))]

    def _reduce(self, x: torch.Tensor, top: bool) -> None:
        parts = [torch.frombuffer(bytearray(raw), dtype=x.dtype) for raw in self.transport.gather(x.numpy().tobytes())]
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
        error: RingAttentionError | None = None
        if self.rank == 0:
            try:
                save(path, wholes[0], wholes[1].squeeze(-1))
            except RingAttentionError as caught:
                error = caught
        told = self.transport.gather(json.dumps(str(error) if error else None).encode())
        if json.loads(told[0]) is not None:
            raise error or Mismatch(f"rank 0 could not write the output: {json.loads(told[0])}")
