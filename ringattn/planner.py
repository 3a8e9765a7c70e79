"""`make_plan`: the plan of its arguments, where a layout or a schedule may be "auto"."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .cache import Cache
from .layout.regular import DEFAULT_LAYOUT, Layout, make_layout
from .machine.machine import Machine
from .machine.presets import get_machine
from .pattern import Pattern, as_pattern
from .plan.plan import Plan, check_sizes
from .plan.schedules import resolve

if TYPE_CHECKING:
    import torch

#: Bytes of the plans that `make_plan` remembers.
PLANS = 1 << 25
#: Plans made lately, with what was worked out from them.
_plans = Cache(PLANS, lambda plan: int(plan.kept_bytes), grows=True)


def make_plan(
    pattern: Pattern | str,
    *,
    tokens: int,
    ranks: int,
    layout: str | Layout = DEFAULT_LAYOUT,
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
) -> Plan:
    """The (cached) plan of attention with `pattern` (or its text) over `tokens` positions on `ranks` ranks.

    `heads` query heads share `kv_heads` (default: as many) key/value heads; `head_dim` is that of q and k,
    `value_dim` that of v (default: the same). `dtype` names the dtype of q, k and v. `comm_dtype` is the dtype in which
    keys, values and their gradients travel between ranks: by default K/V as they are and gradients in fp32 (fp64 for
    fp64); a narrower one is rounded to, gradients in every hop. `rotate` says what goes around in the backward: "keys"
    (with values and their gradients), "queries" (with out's gradient, lse and their own gradient), or "auto", what
    sends fewer bytes; with a wire dtype that is keys, as rounded queries have not the weights of the forward.

    layout="auto" and schedule="auto" take what the timing model predicts to be fastest in the forward, on `machine` (a
    Machine, "cpu" or "cuda"; default "cpu"); `plan.choice` says what was compared and why. Raises InvalidInput.
    """
    pattern = as_pattern(pattern)
    sizes = check_sizes(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype, batch=batch,
        comm_dtype=comm_dtype, rotate=rotate,
    )  # fmt: skip
    pattern.check(tokens, heads)
    chosen = isinstance(layout, str) and layout.strip() == "auto"
    tried: tuple[str | Layout, ...] = (layout,)
    if chosen:
        from .timing.auto import layouts  # a plan of named parts needs no model of time

        tried = layouts(ranks)
    made = tuple(make_layout(one, tokens=tokens, ranks=ranks, pattern=pattern, heads=heads) for one in tried)
    name = resolve(schedule, ranks, heads, sizes.kv_heads)
    inputs = pattern.bind(heads, tokens), *sizes
    chosen_machine = get_machine(machine)
    key: tuple[Any, ...]
    make: Callable[..., Plan]
    if chosen or name == "auto":
        make, key = _choice, (made, None if name == "auto" else (name,), chosen_machine, *inputs)
    else:
        make, key = Plan, (inputs[0], made[0], name, *inputs[1:])
    return make(*key) if pattern.transient else _plans.answer((make, *key), lambda: make(*key))


def _choice(
    tried: tuple[Layout, ...], names: tuple[str, ...] | None, machine: Machine, pattern: Pattern, *inputs: Any
) -> Plan:
    from .timing.auto import choose

    plan, choice = choose(lambda layout, name: Plan(pattern, layout, name, *inputs), tried, names, machine)
    return plan.asking(plan.demand, choice)
