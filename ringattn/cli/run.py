"""ringattn run: run attention over one input; time it, count its messages, and compare it with the oracle."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..call.functional import ring_attention
from ..errors import InvalidInput
from ..files import STDOUT
from ..plan.plan import Plan
from ..transport.base import Message, Post, Transport
from ..transport.launcher import detect
from ..transport.records import Exchange, exchange_values
from .config.schema import RunConfig
from .inputs import InputSource, open_source, read_shard
from .ranks import check_ranks, rank_device, start_ranks
from .run_decode import DecodeRun
from .run_job import RankMeasurements, Run, check_memory, check_outputs, plan_run, save_output
from .run_offloaded import OffloadedRun


def main(config: RunConfig) -> dict[str, Any] | None:
    """Run attention: on virtual ranks, offloaded chunk by chunk, as one rank of a launched job, or on new local ranks.

    Returns the report; None on ranks other than 0 of a launched job.
    """
    config.check()
    check_ranks(config, "virtual")
    _check_paths(config)
    is_virtual = config.transport.spec == "virtual"
    launcher = detect().kind
    if launcher != "none" and (config.offload is not None or is_virtual):
        setting = "transport=virtual" if config.offload is None else f"offload={config.offload}"
        raise InvalidInput(f"{setting} runs in one process; start ringattn run without {launcher}")
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
    """Set `cores` and `ranks_per_node` of the machine if local ranks share cores, so that `auto` takes it into account.

    Does nothing if the machine already has nodes.
    """
    machine, count = config.machine.made(ranks=config.ranks), os.cpu_count() or 1
    cores = machine.cores or max(1, count // (config.threads or max(1, count // config.ranks)))
    given = vars(config.machine)
    if cores < config.ranks and machine.ranks_per_node == 1 and given["ranks_per_node"] is None:
        given.update(cores=cores, ranks_per_node=config.ranks)


def _check_paths(config: RunConfig) -> None:
    """Raise InvalidInput if an output would overwrite the input or another output, or has the wrong file type."""
    source, output, report = config.input.path, config.output.path, config.output.report
    if source is not None and output is not None and Path(source).resolve() == Path(output).resolve():
        raise InvalidInput(f"output.path={output} is the input, which it would overwrite; give another path")
    if output is not None and Path(output).suffix != ".safetensors":
        raise InvalidInput(
            f"output.path={output}: the output is a safetensors file; give a path that ends in .safetensors"
        )
    for other in (source, output) if report not in (None, STDOUT) else ():
        if other is not None and report is not None and Path(other).resolve() == Path(report).resolve():
            raise InvalidInput(f"output.report={report} would overwrite {other}; give another path")


def _plan_for_ranks(config: RunConfig) -> Plan | None:
    """The plan of the local ranks; None with mode=decode. Checks everything here, so errors are raised only once."""
    if config.mode == "decode":
        DecodeRun(config, None).open()
        return None
    plan = plan_run(config, open_source(config), config.ranks)
    check_memory(plan, plan.tokens)
    check_outputs(config)
    return plan


def _worker(config: RunConfig, transport: Transport, plan: Plan | None) -> dict[str, Any] | None:
    """Run one rank. `plan` is None under a launcher: then each rank makes the plan itself."""
    return DecodeRun(config, transport).run() if config.mode == "decode" else RankRun(config, transport, plan).run()


class RankRun(Run):
    """A run in which this process is one rank; ranks exchange all data, even measurements, over the transport."""

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

    def load(self, source: InputSource) -> tuple[torch.Tensor, ...]:
        return read_shard(source, self.plan.layout, self.rank)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.inputs
        options = {**self.options(), "transport": self.transport, "check": self.config.transport.check}
        out, lse = ring_attention(q, k, v, self.plan.pattern, **options)
        return out, lse

    def barrier(self) -> None:
        exchange_values(self.transport, "barrier", None)

    def count_bytes(self, *, backward: bool) -> int:
        sent = self.transport.counters.sent_bytes
        self.transport.counters.reset()
        return sent

    def collect(self, measurements: RankMeasurements) -> list[RankMeasurements]:
        return exchange_values(self.transport, "measurements", measurements, RankMeasurements)

    def positions(self) -> np.ndarray:
        return self.plan.layout.positions(self.rank)

    def reduce(self, x: torch.Tensor, top: bool) -> None:
        records = exchange_values(self.transport, "oracle", x.numpy().tobytes(), bytearray)
        parts = [torch.frombuffer(record, dtype=x.dtype) for record in records]
        stacked = torch.stack(parts).view(self.ranks, *x.shape)
        x.copy_(stacked.amax(0) if top else stacked.sum(0))

    def write(self, path: Path, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Gather the output of all ranks on rank 0, and write it to `path` there."""
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

    def _transfer(self, x: torch.Tensor, peer: int, *, send: bool) -> None:
        """Send a contiguous tensor to another rank, or receive it in place."""
        if x.numel():
            messages = (Message(peer, 0, x.view(-1).view(torch.uint8)),)
            post = Post(messages, (), "output") if send else Post((), messages, "output")
            self.transport.wait(self.transport.post(post))
