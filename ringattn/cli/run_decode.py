"""ringattn run mode=decode: a prompt in chunks, then tokens one at a time, with a K/V cache sharded over ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rich.console import Console

from ..errors import InvalidInput
from ..files import STDOUT, check_json, write_json
from ..inference.cache import KVCache
from ..pattern import Causal, parse_pattern
from ..simulator.numerics.oracle import oracle_rows_alone
from ..simulator.reporting.console import Number, print_numbers, show_progress
from ..text import duration, plural, rate, size
from ..transport.base import Transport
from ..transport.launcher import progress_stream
from ..transport.records import exchange_values
from .config.schema import RunConfig, parse_size
from .inputs import NAMES, InputSource, open_source
from .ranks import rank_device


class DecodeRun:
    """Fills a `KVCache` with a prompt, adds new tokens one at a time, and measures both.

    This process is one rank of `transport`; with None, it computes all ranks as virtual ranks.
    """

    def __init__(self, config: RunConfig, transport: Transport | None) -> None:
        sizes = (parse_size(x, name) for x, name in ((config.context, "context"), (config.new, "new")))
        self.context, self.new = sizes
        self.chunk = self.context if config.chunk is None else parse_size(config.chunk, "chunk")
        if not min(self.context, self.new, self.chunk, config.batch):
            raise InvalidInput("mode=decode needs context=, new=, chunk= and batch= of at least 1")
        self.config, self.transport = replace(config, tokens=self.context + self.new), transport
        self.pattern = parse_pattern(config.pattern.spec)
        total, heads = self.context + self.new, range(config.heads)
        alone, causal = (
            each.bind(config.heads, total).count(range(total), range(total), heads)
            for each in (self.pattern, self.pattern & Causal())
        )
        if alone != causal:
            raise InvalidInput(
                f"mode=decode pattern={config.pattern.spec}: tokens see later ones, but decoding is causal; try "
                f"'Causal() & ({config.pattern.spec})'"
            )

    def run(self) -> dict[str, Any] | None:
        """Decode, compare with attention in fp64, and print; returns the report on rank 0, None on the others."""
        config, transport = self.config, self.transport
        source, total = self.open(), self.context + self.new
        who: dict[str, Any] = {"ranks": config.ranks} if transport is None else {"transport": transport}
        cache = KVCache(
            self.pattern,
            layers=1, layout=config.layout.spec, max_tokens=total, merge=config.merge, windows=config.windows, **who,
        )  # fmt: skip
        device = torch.device("cpu") if transport is None else rank_device(config)
        options: Any = {
            "kernel": config.kernel.spec, "scale": config.scale, "deterministic": config.deterministic,
        }  # fmt: skip
        counters = cache.transport.counters if transport is None else [transport.counters]
        assert isinstance(counters, list)
        prompt, steps, outs = [], [], []
        first_rank = transport is None or transport.rank == 0
        with show_progress(Console(file=progress_stream()), shown=first_rank) as tell:
            for first in range(0, self.context, self.chunk):
                tokens = range(first, min(first + self.chunk, self.context))
                mine = cache.shard(len(tokens)) - first
                rows = [source.rows(name, tokens)[:, :, mine].to(device) for name in NAMES]
                prompt.append(self._time(lambda rows=rows: cache.prefill(0, *rows, **options))[0])
                tell(cache.length, total, "tokens")
            for x in counters:
                x.reset()
            for token in range(self.context, total):
                rows = [source.rows(name, range(token, token + 1)).to(device) for name in NAMES]
                seconds, out = self._time(lambda rows=rows: cache.step(0, *rows, **options))
                steps.append(seconds)
                outs.append(out.cpu())
                tell(cache.length, total, "tokens")
        mine_counted = [[x.sent_messages // self.new, x.sent_bytes // self.new] for x in counters]
        told = exchange_values(self.transport, "decode", {"counted": mine_counted, "nbytes": cache.nbytes})
        if not first_rank:
            return None
        record = {
            "pattern": repr(self.pattern), "context": self.context, "new": self.new, "chunk": self.chunk,
            "where": f"{cache.layout} on {cache.transport.size} {config.transport.spec} ranks",
            "prefill_seconds": sum(prompt), "step_seconds": steps, "median_step": median(steps),
            "messages_per_token": [pair[0] for one in told for pair in one["counted"]],
            "bytes_per_token": [pair[1] for one in told for pair in one["counted"]],
            "cache_bytes": [one["nbytes"] for one in told],
            "error": self._error(torch.cat(outs, 2), source),
        }  # fmt: skip
        if config.output.report != STDOUT:
            self._print(record)
        if config.output.report is not None:
            write_json(config.output.report, record)
        return record

    def open(self) -> InputSource:
        """The input. Raises InvalidInput, also if the report cannot be written."""
        source, total = open_source(self.config), self.context + self.new
        if source.shape.tokens != total:
            raise InvalidInput(f"context + new = {total:,}, but the input has {source.shape.tokens:,} tokens")
        check_json(self.config.output.report)
        return source

    def _time(self, call: Any) -> tuple[float, torch.Tensor]:
        """(seconds, result) of a call, timed after all processes have met."""
        exchange_values(self.transport, "decode", None)
        start = time.perf_counter()
        out = call()
        if out.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, out

    def _error(self, out: torch.Tensor, source: InputSource) -> float | None:
        """The largest error of the last new tokens, relative to the largest oracle output; None if sample=0."""
        count, total = min(self.config.sample, self.new), self.context + self.new
        if not count:
            return None
        q, k, v = (source.rows(name, range(total)) for name in NAMES)
        factor = 1.0 if self.config.scale is None else self.config.scale * q.shape[3] ** 0.5
        truth = oracle_rows_alone(self.pattern, [*range(total - count, total)], q.double() * factor, k, v)
        return float((out[:, :, -count:].double() - truth).abs().max() / truth.abs().max())

    def _print(self, record: dict[str, Any]) -> None:
        """Print a record as a table."""
        steps, messages, sent = record["step_seconds"], record["messages_per_token"], record["bytes_per_token"]
        spread = f"{duration(min(steps))} .. {duration(max(steps))} over {plural(self.new, 'token')}"
        held = ", ".join(map(size, record["cache_bytes"]))
        prefill = record["prefill_seconds"]
        numbers = [
            Number("prompt", f"{duration(prefill)}, {rate(self.context / prefill, 'tokens/s')}", "measured"),
            Number("time of a token", f"{duration(record['median_step'])} median ({spread})", "measured"),
            Number("messages of a token", f"{max(messages):,} of a rank at most", "counted"),
            Number("bytes of a token", f"{max(sent):,} of a rank at most, {sum(sent):,} in all", "counted"),
            Number("keys and values", f"{held} by process", "counted"),
        ]
        if record["error"] is not None:
            text = f"{record['error']:.2e} of the largest output, the last new tokens against fp64"
            numbers.append(Number("error", text, "measured"))
        print_numbers(f"{self.pattern!r}, {self.context:,} + {self.new:,} tokens, {record['where']}", numbers)
