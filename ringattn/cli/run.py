"""ringattn run: attention over one input, timed, counted, and compared with the oracle."""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..call.functional import ring_attention
from ..errors import InvalidInput
from ..files import STDOUT
from ..plan.plan import Plan
from ..transport.base import Message, Post, Transport
from ..transport.launcher import detect
from ..transport.records import Exchange
from .config.groups import check_least
from .config.schema import RunConfig
from .inputs import InputSource, open_source, read_shard
from .ranks import check_ranks, rank_device, start_ranks
from .run_decode import DecodeRun
from .run_job import RankMeasurements, Run, check_memory, check_outputs, plan_run, save_output
from .run_offloaded import OffloadedRun


def main(config: RunConfig) -> dict[str, Any] | None:
    """Run on virtual ranks, chunk by chunk, as one rank of a launched job, or on local ranks started here.

    Returns the report; None on other ranks of a launched job.
    """
    config.check()
    check_ranks(config, "virtual")
    check_least(config, repeat=1, sample=0)
    _check_paths(config)
    is_virtual = config.transport.spec == "virtual"
    launcher = detect().kind
    if launcher != "none" and (config.offload is not None or is_virtual):
        setting = "transport=virtual" if config.offload is None else f"offload={config.offload}"
        raise InvalidInput(f"{setting} is one process, not {launcher}'s; start ringattn run without {launcher}")
    if config.offload is None and not is_virtual:
        plan = None
        if launcher == "none" and config.transport.spec == "gloo":
            _count_cores(config)
            plan = _plan_for_ranks(config)
        return start_ranks(config, partial(_worker, plan=plan), "run")
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    if config.mode == "decode":
        return DecodeRun(config, None).run()
    return (Run if config.offload is None else OffloadedRun)(config).run()


def _count_cores(config: RunConfig) -> None:
    """Tell the machine where local ranks share cores, unless it has nodes of its own: `auto` counts that."""
    machine, count = config.machine.made(ranks=config.ranks), os.cpu_count() or 1
    cores = machine.cores or max(1, count // (config.threads or max(1, count // config.ranks)))
    given = vars(config.machine)
    if cores < config.ranks and machine.ranks_per_node == 1 and given["ranks_per_node"] is None:
        given.update(cores=cores, ranks_per_node=config.ranks)


def _check_paths(config: RunConfig) -> None:
    """Raise InvalidInput where an output would replace the input or the other output, or has another format."""
    source, output, report = config.input.path, config.output.path, config.output.report
    if source is not None and output is not None and Path(source).resolve() == Path(output).resolve():
        raise InvalidInput(f"output.path={output} is the input, which would be lost; give another path")
    if output is not None and Path(output).suffix != ".safetensors":
        raise InvalidInput(
            f"output.path={output}: safetensors is what is written; give a path that ends in .safetensors"
        )
    for other in (source, output) if report not in (None, STDOUT) else ():
        if other is not None and report is not None and Path(other).resolve() == Path(report).resolve():
            raise InvalidInput(f"output.report={report} is {other}, which would be lost; give another path")


def _plan_for_ranks(config: RunConfig) -> Plan | None:
    """The plan of the ranks that this process starts; None with mode=decode. Raises errors once, before any starts."""
    if config.mode == "decode":
        DecodeRun(config, None).open()
        return None
    plan = plan_run(config, open_source(config), config.ranks)
    check_memory(plan, plan.tokens)
    check_outputs(config)
    return plan


def _worker(config: RunConfig, transport: Transport, plan: Plan | None) -> dict[str, Any] | None:
    """What a rank does; it plans itself where a launcher started it, and `plan` is None."""
    return DecodeRun(config, transport).run() if config.mode == "decode" else RankRun(config, transport, plan).run()


class RankRun(Run):
    """This process is one rank of a transport, which carries all that the ranks exchange, measurements too."""

    def __init__(self, config: RunConfig, transport: Transport, plan: Plan | None) -> None:
        super().__init__(config, plan)
        self.rank, self.ranks = transport.rank, transport.size
        self.transport = transport
        self.device = rank_device(config)

    def open(self) -> None:
        with Exchange(self.transport, "input"):
            super().open()

    def executed_ranks(self) -> range:
        return range(self.rank, self.rank + 1)

    def check_plan(self) -> None:
        check_memory(self.plan, self.plan.layout.rows(self.rank))

    def load(self, source: InputSource) -> tuple[torch.Tensor, ...]:
        return read_shard(source, self.plan.layout, self.rank)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        options = {**self.options(), "transport": self.transport, "check": self.config.transport.check}
        out, lse = ring_attention(q, k, v, self.plan.pattern, **options)
        return out, lse

    def barrier(self) -> None:
        self._exchange("barrier", b"")

    def count_bytes(self, *, backward: bool) -> int:
        sent = self.transport.counters.sent_bytes
        self.transport.counters.reset()
        return sent

    def collect(self, measurements: RankMeasurements) -> list[RankMeasurements]:
        return [pickle.loads(record) for record in self._exchange("measurements", pickle.dumps(measurements))]

    def compare(self, out: torch.Tensor) -> float | None:
        return self.sampled_error(out, self.plan.layout.positions(self.rank), self._reduce)

    def process_name(self, rank: int) -> str:
        return f"rank {rank}"

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Rank 0 receives shard after shard and writes them: it alone holds the whole output."""
        layout = self.plan.layout
        sequences = []
        for x in (out.contiguous(), lse.unsqueeze(-1).contiguous()):
            if self.rank:
                self._transfer(x, 0, send=True)
                continue
            shards = [x]
            for rank in range(1, self.ranks):
                shard = x.new_empty((*x.shape[:2], layout.rows(rank), x.shape[3]))
                self._transfer(shard, rank, send=False)
                shards.append(shard)
            sequences.append(layout.unshard_tensor(shards).cpu())
        with Exchange(self.transport, "output"):
            if self.rank == 0:
                save_output(path, sequences[0], sequences[1].squeeze(-1))

    def _exchange(self, stage: str, record: bytes) -> list[bytes]:
        """The records of every rank, in rank order."""
        with Exchange(self.transport, stage) as exchange:
            exchange.mine = record
        return exchange.records

    def _reduce(self, x: torch.Tensor, top: bool) -> None:
        """Sum a tensor over all ranks, or take the maximum where `top`, in place."""
        records = self._exchange("oracle", x.numpy().tobytes())
        parts = [torch.frombuffer(bytearray(record), dtype=x.dtype) for record in records]
        stacked = torch.stack(parts).view(self.ranks, *x.shape)
        x.copy_(stacked.amax(0) if top else stacked.sum(0))

    def _transfer(self, x: torch.Tensor, peer: int, *, send: bool) -> None:
        """Send a contiguous tensor to another rank, or receive it in place."""
        if x.numel():
            messages = (Message(peer, 0, x.view(-1).view(torch.uint8)),)
            post = Post(messages, (), "output") if send else Post((), messages, "output")
            self.transport.wait(self.transport.post(post))
