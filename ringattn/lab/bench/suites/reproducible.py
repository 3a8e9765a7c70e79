"""Suite "reproducible": what the same bits for any number of ranks cost beside the usual call, on CPUs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from ....call.functional import attention, virtual_attention
from ....pattern import Causal
from ..calls import check_shards, make_call
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, Run, make_settings

#: Lengths of leaves, and what the call may take of the time of the usual one.
MOST = {512: 1.25, 2048: 1.05}
#: Rounds of calls that take seconds.
ROUNDS = 5


def list_cases() -> list[BenchCase]:
    """The cases: one process and four virtual ranks, at 8K and 32K tokens, forward, and forward with backward."""
    return [_case(*each) for each in product((1, 4), (8192, 32768), (False, True))]


def _case(ranks: int, tokens: int, backward: bool) -> BenchCase:
    columns = [BenchColumn("usual", 2, partial(_make, ranks=ranks, length=None))]
    columns += [BenchColumn(f"leaves_{length}", 2, partial(_make, ranks=ranks, length=length)) for length in MOST]
    ratios = tuple(Ratio("usual", f"leaves_{length}", 1 / most) for length, most in MOST.items())
    settings = make_settings(tokens, heads=2, pattern="Causal()", layout="contiguous", backward=backward)
    name = f"{'one_process' if ranks == 1 else f'virtual_{ranks}'}_{tokens}" + "_step" * backward
    return BenchCase(
        name, 1, settings, tuple(columns), ratios, check_shards, rounds=ROUNDS if tokens > 8192 else None,
        weight=(tokens / 8192) ** 2 * (3.5 if backward else 1),
    )  # fmt: skip


def _make(context: Context, ranks: int, length: int | None) -> Run:
    options: Any = {"pattern": Causal(), "reproducible": length}
    if ranks > 1:
        return make_call(context, partial(virtual_attention, ranks=ranks, layout="zigzag", **options), whole=True)
    return make_call(context, partial(attention, **options), whole=True)


def _conclude(records: list[CaseRecord]) -> tuple[str, bool | None]:
    """The largest cost of each length of leaves, and whether all are within their bounds."""
    done = [record["columns"] for record in records if record.get("columns")]
    if not done:
        return "nothing was measured", None
    cost = {
        length: max(columns[f"leaves_{length}"]["median"] / columns["usual"]["median"] for columns in done)
        for length in MOST
    }
    told = ", ".join(f"{cost[length]:.2f} (at most {most}) with leaves of {length}" for length, most in MOST.items())
    return f"times the usual call, at worst: {told}", all(cost[length] <= most for length, most in MOST.items())


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="The same bits for any number of ranks",
    about=(
        "Causal attention, batch 1, 2 heads of 64, fp32, two threads: the usual call, and reproducible=512 and 2,048, "
        "in turn; one process, and four virtual ranks in it with zigzag shards. Cases named step have a backward, too.",
    ),
)
