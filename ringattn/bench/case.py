"""What a suite declares: cases, the columns that a case compares, and ratios of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ..dtypes import dtype_name
from ..functional import ring_attention
from ..layout.regular import Layout, make_layout
from ..pattern import parse_pattern
from ..transport.base import Transport
from .links import Links

#: One run of a column on this rank; returns the rank's result.
Run = Callable[[], Any]
#: The record of a case, as the JSON file of a suite holds it.
CaseRecord = dict[str, Any]
#: Most relative error of a result, by dtype; a result with a larger error is wrong, and is not timed.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
#: Heads and head dimension of a case where its suite does not say otherwise.
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Context:
    """The process that builds a column: one rank of the case's ranks. `transport` is set in cases with links."""

    rank: int
    ranks: int
    settings: dict[str, Any]
    transport: Transport | None = None


@dataclass(frozen=True)
class BenchColumn:
    """One of the things that a case compares.

    `make(context)` is called once per process and returns the function that is timed, or None on a rank that only waits
    for the others. `threads` is torch's thread count during the run. The tensors of a column that is not `weighed` are
    not counted.
    """

    name: str
    threads: int
    make: Callable[[Context], Run | None]
    weighed: bool = True


@dataclass(frozen=True)
class Ratio:
    """Time of column `over` divided by time of column `under`: above 1, `under` is faster.

    `target` is the promised least ratio, if any. `work` is the work of `under` in units of the work of `over`, counted;
    the ratio is multiplied by it, and becomes a ratio of rates.
    """

    over: str
    under: str
    target: float | None = None
    work: float = 1.0

    @property
    def label(self) -> str:
        """The ratio in words."""
        return f"{self.over} / {self.under}" + ("" if self.work == 1.0 else f" x {self.work:.4g}")


@dataclass(frozen=True)
class BenchCase:
    """Columns that run alternately on the same `ranks` processes, and the ratios of their times.

    `check(context, results)` compares the columns' results once, before the timing; it returns errors by name, and
    raises where a result is wrong. A case with `formula_bytes` measures the peak memory of its one column instead of
    its time: the function returns the predicted rise in bytes, and peak / prediction may reach `limit`.
    """

    name: str
    ranks: int
    settings: dict[str, Any]
    columns: tuple[BenchColumn, ...]
    ratios: tuple[Ratio, ...] = ()
    check: Callable[[Context, dict[str, Any]], dict[str, float]] | None = None
    formula_bytes: Callable[[Context], int] | None = None
    limit: float | None = None
    #: Most rounds, for cases that take minutes.
    rounds: int | None = None
    #: The network between the ranks; None: they are processes of one machine.
    links: Links | None = None
    #: How the numbers were obtained, for readers of the record.
    notes: tuple[str, ...] = ()
    #: Concludes from the record of the case: a row of a table, or several, stored in the record under "summary".
    summarise: Callable[[CaseRecord], dict[str, Any] | list[dict[str, Any]]] | None = None
    #: Measures the case, for cases that the clock of the host cannot time. Receives the context and the rounds, and
    #: returns the raw numbers of `runner.measure_case`, with "details" for `summarise`. Columns may be missing.
    measure: Callable[[Context, int], dict[str, Any]] | None = None
    #: Seconds after which the processes of the case are killed.
    timeout: float = 3600.0
    #: About how long the case takes, relative to the other cases of its suite.
    weight: float = 1.0
    #: A failure is a result of the case, such as the length at which memory ends, and not a failure of the suite.
    may_fail: bool = False
    #: A shorter case: where it failed, or shows that a call would take too long, this case is not tried.
    after: str | None = None
    #: Errors that say that a column cannot run here. In a case that has some, such a column, and one whose error is
    #: TOLERANCES or more, is missing, with the reason in "details", and the others are timed.
    lacking: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Claim:
    """A figure of an earlier report, what that figure really was, and what ours is, as a sentence on the records."""

    figure: str
    really: str
    ours: Callable[[list[CaseRecord]], str]


@dataclass(frozen=True)
class BenchSuite:
    """A suite: a function that lists its cases, and what it concludes from the records of all measured cases.

    The conclusion is a sentence, and whether the target is met. `check` receives the folder of the results before
    anything is measured, and raises InvalidInput or Unsupported where the suite cannot run. `title`, `about` and
    `claim` are for readers of the report. `bars` is what its plot compares, in words, and a case's numbers by name;
    without it the plot compares ratios, or times.
    """

    cases: Callable[[], list[BenchCase]]
    conclude: Callable[[list[CaseRecord]], tuple[str, bool]] | None = None
    check: Callable[[Path], None] | None = None
    title: str = ""
    about: tuple[str, ...] = ()
    claim: Claim | None = None
    bars: tuple[str, Callable[[CaseRecord], dict[str, float]]] | None = None


#: A number of a case's record; None where the record does not have it.
Values = Callable[[CaseRecord], float | None]


def make_settings(
    tokens: int, dtype: str = "float32", *, heads: int = HEADS, head_dim: int = HEAD_DIM, **more: Any
) -> dict[str, Any]:
    """The settings of a case of attention with a batch of 1."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": dtype, "tokens": tokens}
    return sizes | more


#: Most rows of an input that are drawn; a longer input consists of blocks of so many rows, with random signs.
DRAWN = 32768


def make_inputs(settings: dict[str, Any], count: int, tokens: int | None = None) -> list[torch.Tensor]:
    """`count` tensors [B, H, N, D] of the whole sequence, equal on all ranks; N is `tokens` where given.

    Drawing a million rows would take longer than attention over them, so that the signs of the columns, which differ
    from block to block and head to head, make new rows of old ones.
    """
    source, dtype = torch.Generator().manual_seed(1), getattr(torch, settings["dtype"])
    batch, heads, width = settings["batch"], settings["heads"], settings["head_dim"]
    shape = (batch, heads, tokens or settings["tokens"], width)
    inputs = [torch.empty(shape, dtype=dtype, device="cpu") for _ in range(count)]  # all, before time goes into any
    for x in inputs:
        if x.shape[2] <= DRAWN:
            x.normal_(generator=source)
            continue
        drawn = torch.empty((batch, heads, DRAWN, width), dtype=dtype, device="cpu").normal_(generator=source)
        for block in x.split(DRAWN, 2):
            signs = torch.randint(0, 2, (batch, heads, 1, width), generator=source, device="cpu") * 2 - 1
            torch.mul(drawn[:, :, : block.shape[2]], signs.to(dtype), out=block)
    return inputs


def get_layout(context: Context, name: str | None = None) -> Layout:
    """The layout of the settings, or of this name, for the tokens and ranks of a case."""
    return make_layout(name or context.settings["layout"], tokens=context.settings["tokens"], ranks=context.ranks)


def make_shards(context: Context, tensors: Sequence[torch.Tensor], layout: str | None = None) -> list[torch.Tensor]:
    """Copies of this rank's rows of tensors of the whole sequence, by `get_layout`."""
    return [get_layout(context, layout).shard_tensor(x, context.rank).clone() for x in tensors]


def gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The tensor of the whole sequence of which every rank has its shard. Collective."""
    shards = [x.new_empty((*x.shape[:2], layout.rows(rank), x.shape[3])) for rank in range(layout.ranks)]
    dist.all_gather(shards, x.contiguous())
    return layout.unshard_tensor(shards)


def make_pass(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor | None) -> Run:
    """A run of attend(q, k, v), which returns the output and, with `grad`, the gradients of the inputs."""
    inputs = [x.requires_grad_(grad is not None) for x in inputs]

    def run() -> tuple[torch.Tensor, ...]:
        out = attend(*inputs)
        return (out.detach(), *(() if grad is None else torch.autograd.grad(out, inputs, grad)))

    return run


def make_call(
    context: Context, attend: Callable[..., torch.Tensor], *, whole: bool = False, layout: str | None = None
) -> Run:
    """As `make_pass`, of this rank's shards, or of the whole sequence; with gradients where the settings have them."""
    inputs = make_inputs(context.settings, 4 if context.settings.get("backward") else 3)
    q, k, v, *grad = inputs if whole else make_shards(context, inputs, layout)
    return make_pass(attend, [q, k, v], grad[0] if grad else None)


def make_alone(context: Context, attend: Callable[..., torch.Tensor]) -> Run | None:
    """As `make_call` of the whole sequence, on rank 0; the other ranks wait."""
    return None if context.rank else make_call(context, attend, whole=True)


def make_single(context: Context) -> Run | None:
    """torch's own dense or causal attention, by `make_alone`."""
    return make_alone(context, partial(scaled_dot_product_attention, is_causal=context.settings["causal"]))


def make_ring(context: Context, schedule: str = "ring", transport: Transport | None = None) -> Run:
    """Our attention on the ranks of a case, by a schedule; over `transport` in place of that of the context."""
    pattern, layout = parse_pattern(context.settings["pattern"]), context.settings["layout"]
    options: Any = {"schedule": schedule, "transport": transport or context.transport}
    return make_call(context, partial(ring_attention, pattern=pattern, layout=layout, **options))


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference, divided by the largest absolute entry of the exact tensor."""
    return float((result.double() - exact.double()).abs().max() / exact.double().abs().max())


def check_error(name: str, results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest relative error of some tensors. Raises AssertionError above the one of TOLERANCES."""
    error = max(relative_error(x, y) for x, y in zip(results, exact, strict=True))
    assert error < TOLERANCES[dtype_name(results[0].dtype)], f"{name} is wrong by {error:.1e}"
    return error


def iqr(values: list[float]) -> float:
    """The distance between the quartiles; 0 of a single value."""
    return float(np.subtract(*np.percentile(values, (75, 25))))
