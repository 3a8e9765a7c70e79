"""`make_plan` and `make_plans`: they make plans, and choose a layout or schedule that is "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..cache import Cache
from ..errors import InvalidInput
from ..layout.leafwise import round_layout
from ..layout.regular import DEFAULT_LAYOUT, Layout, make_layout, read_masks
from ..pattern import Pattern, as_pattern
from ..plan.plan import Plan, arrange, bind_sides
from ..plan.schedules import resolve, takes_node
from ..plan.steps import PlanSizes, parse_rotate
from ..text import shown

if TYPE_CHECKING:
    import torch

    from ..machine.machine import Machine

#: Bytes of the plans that `make_plan` remembers.
PLANS = 1 << 25
#: The latest plans, keyed by their inputs, with the results that they cache.
_plans = Cache(PLANS, lambda plan: int(plan.kept_bytes), grows=True)


def make_plan(
    pattern: Pattern | str,
    *,
    tokens: int,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    q_layout: str | Layout | None = None,
    q_tokens: int | None = None,
    schedule: str = "auto",
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: str | torch.dtype = "float32",
    batch: int = 1,
    comm_dtype: str | torch.dtype | None = None,
    machine: Machine | str | None = None,
    rotate: str = "auto",
    block: Sequence[Sequence[Any]] | None = None,
    reproducible: int | None = None,
) -> Plan:
    """Make the plan of an attention call: what each of `ranks` ranks computes and sends, for `tokens` positions.

    `pattern` is a Pattern or its text. Plans are cached. `heads` query heads share `kv_heads` (default: as many)
    key/value heads. `head_dim` is the width of q and k, `value_dim` (default: the same) the width of v, and `dtype` the
    dtype of q, k and v. `comm_dtype` is the dtype in which keys, values and their gradients travel between ranks: by
    default, K/V in their own dtype and gradients in fp32 (fp64 for fp64 inputs); a narrower dtype rounds K/V once, and
    gradients in every hop.

    `rotate` selects what travels in the backward: "kv" (pass-KV: keys and values with the gradients of both), "q"
    (pass-Q, arXiv:2411.01783: queries with the gradients of out and of q, and with lse), or "auto", whichever sends
    fewer bytes. With a `comm_dtype`, "auto" is "kv", because with rounded queries the backward would compute other
    attention weights than the forward. With a `q_layout`, `rotate` holds for the forward, too: in pass-Q, queries then
    travel with their (out, lse) so far, in fp32 (fp64 for fp64 inputs), and "auto" takes for the forward what the
    timing model predicts to be faster on `machine`. "q, kv" gives each pass its own: first the forward, then the
    backward.

    `block` lists (heads, width, dtype) of the tensors that travel instead of k and v, see `ra.Rows`; all their heads
    travel together. The dtype defaults to `dtype`. For DeepSeek-V3: heads=128, head_dim=192, value_dim=128,
    block=((1, 512), (1, 64)).

    If the queries are at other positions than the keys, `q_layout` is the Layout of the queries, or its name, and
    `q_tokens` their number (default: `tokens`); `tokens` and `layout` then describe the keys. For a chunk of 24 queries
    after 1000 cached keys: tokens=1024, q_layout="shifted(zigzag, 1000)", q_tokens=24. In the name of a q_layout,
    "auto" stands for the keys' layout: "shifted(auto, 1000)".

    With `reproducible`, the length of a leaf, the plan is that of a call whose bits do not depend on the ranks, see
    `AttentionOptions`; a layout "contiguous", "zigzag" or "balanced" gets borders between leaves.

    schedule="double_ring" and "ulysses" without a number take the ranks per node of `machine`. layout="auto" and
    schedule="auto" take the layout and the schedule that the timing model predicts to be fastest in the forward on
    `machine` (a Machine, "cpu" or "cuda"; default "cpu"); `plan.choice` shows what was compared, and the reason for the
    choice. Raises InvalidInput.
    """
    sizes: Any = (heads, kv_heads, head_dim, value_dim, dtype, batch, comm_dtype, rotate, block, reproducible)
    return find_plan(
        as_pattern(pattern),
        PlanSizes(*sizes),
        tokens=tokens,
        ranks=ranks,
        layout=round_layout(layout, reproducible),
        q_layout=q_layout,
        q_tokens=q_tokens,
        schedule=schedule,
        machine=machine,
    )


def find_plan(
    pattern: Pattern,
    sizes: PlanSizes,
    *,
    tokens: int,
    ranks: int,
    layout: str | Layout,
    q_layout: str | Layout | None,
    q_tokens: int | None,
    schedule: str,
    machine: Machine | str | None,
) -> Plan:
    """Like `make_plan`, but takes a Pattern instead of text, and sizes that have already been checked."""
    heads = sizes.heads
    choose_layout = isinstance(layout, str) and layout.strip() == "auto"
    names: tuple[str | Layout, ...] = (layout,)
    if choose_layout:
        from ..simulator.timing.auto import list_layouts  # plans with a named layout and schedule need no timing model

        names = list_layouts(ranks)
    own: dict[Layout, Layout] = {}
    square = q_layout is None and q_tokens in (None, tokens)
    forward, backward = parse_rotate(sizes.rotate, both=not square)
    if square:
        layouts = [make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern, heads=heads) for name in names]
    else:
        count = tokens if q_tokens is None else q_tokens
        named = (name for name in names if not choose_layout or name != "balanced")
        own = dict(_make_sides(name, q_layout, tokens, count, ranks) for name in named)
        layouts = [*own]
    if own and all(layout == of_queries for layout, of_queries in own.items()):  # `rotate` is for both passes
        own = {}
        sizes = replace(sizes, rotate=f"q, {backward}" if forward == "q" else sizes.rotate)
    if not own:
        pattern.check(tokens, heads)
    bound = bind_sides(pattern, layouts[0], own[layouts[0]], heads) if own else pattern.bind(heads, tokens)
    rotates = [sizes.rotate]
    if own and forward == "auto":  # a comm_dtype asks for rounded keys
        forms = ("kv",) if ranks == 1 or sizes.comm_dtype is not None else ("kv", "q")
        rotates = [f"{form}, {backward}" for form in forms]
    schedule = resolve_auto(schedule, sizes.reproducible)
    choosing = choose_layout or schedule == "auto" or len(rotates) > 1
    by_events = own or forward == "q"
    on_machine = None
    if choosing or machine is not None or takes_node(schedule):
        from ..machine.presets import get_machine  # as above

        on_machine = get_machine(machine)
    node = None if on_machine is None else on_machine.ranks_per_node
    schedule = resolve(schedule, ranks, heads, sizes.kv_heads, node)

    def make(layout: Layout, schedule: str, rotate: str = rotates[0]) -> Plan:
        return arrange(bound, layout, schedule, replace(sizes, rotate=rotate), own.get(layout))

    def make_it() -> Plan:
        if not choosing:
            return make(layouts[0], schedule)
        from ..simulator.timing.auto import choose, choose_rectangle

        assert on_machine is not None
        wanted = None if schedule == "auto" else schedule
        if by_events:
            return choose_rectangle(make, layouts, wanted, rotates, on_machine)
        return choose(make, layouts, wanted, on_machine)

    key = tuple(layouts), tuple(own.values()), schedule, on_machine if choosing else None, bound, sizes
    return make_it() if pattern.transient else _plans.answer(key, make_it)


def find_faster_form(pattern: Pattern, sizes: PlanSizes, *, machine: Machine, **named: Any) -> Plan:
    """As `find_plan` for rows that are expanded, or for keys and values if their forward is predicted to be faster."""
    plan = find_plan(pattern, sizes, machine=machine, **named)
    if plan.ranks == 1:
        return plan
    from ..simulator.timing.auto import choose_form  # as above

    named["layout"] = plan.layout.base
    return choose_form(plan, find_plan(pattern, replace(sizes, block=None), machine=machine, **named), machine)


def resolve_auto(schedule: str, reproducible: int | None) -> str:
    """The schedule; "auto" with leaves is "direct": nodes of gradients go straight to owners in any case."""
    resolved = resolve(schedule)
    return "direct" if resolved == "auto" and reproducible is not None else resolved


def make_plans(
    patterns: Sequence[Pattern | str],
    weights: Sequence[int] | None = None,
    *,
    tokens: int,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
    heads: int = 1,
    machine: Machine | str | None = None,
    **options: Any,
) -> tuple[Plan, ...]:
    """Make one plan for each of `patterns`, all with the same layout, for a model whose layers have different masks.

    `weights` are the numbers of layers with each pattern (default: 1); a pattern of weight 0 does not influence the
    layout. "balanced" is made for all patterns together, see `make_layout`. layout="auto" takes the layout with the
    shortest predicted forward of all layers, each pattern with the schedule that is fastest for it. `options` are those
    of `make_plan`. Raises InvalidInput.
    """
    masks, names, plans = read_masks(patterns, weights), [layout], []
    options |= {"tokens": tokens, "ranks": ranks, "heads": heads, "machine": machine}
    if len(masks) == 1:
        return (make_plan(masks[0][0], layout=layout, **options),)
    if isinstance(layout, str) and layout.strip() == "auto":
        from ..simulator.timing.auto import choose_layout, list_layouts  # as above

        names = [*list_layouts(ranks)]
    for name in names:
        cut = make_layout(name, tokens=tokens, ranks=ranks, patterns=patterns, weights=weights, heads=heads)
        plans.append(tuple(make_plan(pattern, layout=cut, **options) for pattern, _ in masks))
    return plans[0] if len(plans) == 1 else choose_layout(plans, [weight for _, weight in masks], machine)


def simulate_layers(plans: Sequence[Plan], weights: Sequence[int], machine: Machine) -> float:
    """Predicted seconds of attention in a model's forward on `machine`; `weights[i]` layers use `plans[i]`."""
    from ..simulator.timing.auto import simulate_seconds  # as above

    return sum(weight * simulate_seconds(plan, machine) for plan, weight in zip(plans, weights, strict=True))


def _make_sides(
    layout: str | Layout, q_layout: str | Layout | None, tokens: int, q_tokens: int, ranks: int
) -> tuple[Layout, Layout]:
    """The layouts of the keys and of queries at other positions. Raises InvalidInput."""
    if q_layout is None:
        raise InvalidInput(
            f"q_tokens={shown(q_tokens)}: the positions of the queries are unknown; give q_layout='contiguous' (from 0 "
            "on) or q_layout='shifted(contiguous, first)'"
        )
    if isinstance(q_layout, str):
        q_layout = q_layout.replace("auto", layout if isinstance(layout, str) else layout.name)
    for name, given in (("layout", layout), ("q_layout", q_layout)):
        if isinstance(given, str) and "balanced" in given:
            raise InvalidInput(
                f"{name}={given!r} needs queries and keys at the same positions; with q_layout=, use another such as "
                "zigzag"
            )
    keys = make_layout(layout, tokens=tokens, ranks=ranks)
    return keys, make_layout(
        q_layout, tokens=q_layout.tokens if isinstance(q_layout, Layout) else q_tokens, ranks=ranks
    )
