"""simulate: a plan on a machine gives a timeline, by the cheapest solver that is exact for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput, Unsupported
from ..machine.machine import Machine
from ..machine.presets import get_machine
from .costs import cost, energy, failures, memory
from .notes import note_assumptions
from .options import SOLVERS, check
from .problem import Problem, problem
from .rates import Factors, Faults, Rates, parse_factors
from .resources import Loads, Traffic, survey
from .solvers.closed_form import closed
from .solvers.events import events
from .solvers.folding import LEAST, folded
from .solvers.incremental import swept
from .solvers.jitter import Sampled, repeated, varied
from .solvers.periodic import quotient
from .solvers.perturbation import cones
from .solvers.recurrence import Solved, Stall
from .solvers.stencil import dense
from .timeline import Timeline

if TYPE_CHECKING:
    from ..plan.plan import Plan

NEEDS = {
    "closed_form": "all ranks and links alike",
    "periodic": "ranks that repeat with a period, and no stalls",
    "perturbation": "few slow ranks or stalls in a uniform ring with one receive slot",
}
#: Ranks x steps that solver stencil goes through with one slot and with more, and those whose numbers are counted one by one:
#: with several slots, and with jitter.
STENCIL, SLOTTED, COUNTED = 1 << 38, 1 << 31, 1 << 28


def simulate(
    plan: Plan,
    machine: Machine | str | None = None,
    *,
    backward: bool = False,
    slow: Factors | None = None,
    slow_links: Factors | None = None,
    stalls: Sequence[Stall] = (),
    passes: int | None = None,
    solver: str = "auto",
    seed: int = 0,
) -> Timeline:
    """The modelled time of a forward, or of a backward, of `plan` on `machine` (a Machine, "cpu" or "cuda").

    `slow` are factors on the visits of each rank (a dict by rank, or one per rank), `slow_links` on the messages that
    each rank sends, `stalls` single visits that take longer. `passes` states a job: how often the pass is made. Energy and
    cost are those of the job, with its failures and checkpoints; without a job they are those of one pass. `solver` names one algorithm (closed_form, periodic, perturbation,
    stencil or events) instead of the cheapest that is exact; jitter is sampled on top of it with `seed`. The events of many ranks may be that of a smaller plan with the same times. Raises
    InvalidInput, and Unsupported where no solver models what was asked for.
    """
    check(plan, backward=backward, stalls=stalls, passes=passes, solver=solver, seed=seed)
    machine = get_machine(machine)
    faults = Faults(
        parse_factors("slow", slow, plan.ranks), parse_factors("slow_links", slow_links, plan.ranks), tuple(stalls)
    )  # fmt: skip
    rates = Rates(plan, machine, backward)
    found = problem(rates, faults)
    if solver == "events" or isinstance(found, str):
        if solver not in ("auto", "events"):
            raise Unsupported(
                f"solver={solver}: it solves rings whose numbers are known of all ranks at once, but {found}"
            )
        compared, noise = "", None
        short = _folded(rates, faults, found) if isinstance(found, str) else "solver=events simulates every rank"
        if isinstance(short, str):
            why = f"{found}; {short}" if isinstance(found, str) else "asked for"
            solved, loads, traffic = events(rates, faults, why)
            noise = _noise_of_events(rates, faults, seed)
        else:
            solved, loads, traffic, compared = short
        return _timeline(rates, solved, compared, *loads.causes(solved.seconds), traffic, noise, passes)
    _check_stalls(found, faults)
    if machine.jitter and (found.bound or (found.counted and plan.ranks * found.steps > COUNTED)):
        raise Unsupported(
            f"jitter on {plan.ranks:,} ranks whose visits differ is too much to sample; leave machine.jitter out, or take "
            "fewer ranks"
        )
    solved, loads, traffic = _solve(found, solver)
    noise = varied(found.whole(), machine.jitter, seed) if machine.jitter else None
    if found.bound:
        compute, exposed = _bounded(rates, found, solved)
        solved = replace(solved, finish=None, why="a rank that is busiest at every step hides every message")
        return _timeline(rates, solved, found.compared, compute, exposed, None, None, passes)
    return _timeline(rates, solved, found.compared, *loads.causes(solved.seconds), traffic, noise, passes)


def _solve(found: Problem, solver: str) -> tuple[Solved, Loads, Traffic]:
    for name in SOLVERS if solver == "auto" else (solver,):
        if name == "stencil" and found.counted is not None and found.ring.buffers == 1:
            _check_size(found, STENCIL)
            return swept(found.counted)
        solved = _tried(found, name)
        if solved is not None:
            return solved, *survey(found.ring, found.copies)
    raise Unsupported(
        f"solver={solver} needs {NEEDS[solver]}, which this plan on this machine has not; try solver=auto"
    )


def _tried(found: Problem, solver: str) -> Solved | None:
    if solver == "closed_form":
        solved = closed(found.ring)
        whole = (found.ring.ranks * found.copies,)
        return solved if solved is None else replace(solved, finish=np.broadcast_to(solved.seconds, whole))
    if solver == "periodic":
        return quotient(found.ring, found.copies)
    if solver == "perturbation":
        return cones(found.whole())
    one = STENCIL if found.ring.buffers == 1 else SLOTTED
    _check_size(found, one if found.counted is None else COUNTED)
    return dense(found.whole())


def _check_size(found: Problem, most: int) -> None:
    ranks = found.ring.ranks * found.copies
    if ranks * found.steps > most:
        raise Unsupported(
            f"{ranks:,} ranks x {found.steps:,} steps with {found.ring.buffers} receive slots are more than {most:,}, the "
            "most that is gone through one by one; try fewer ranks, or leave machine.buffers out"
        )


def _folded(rates: Rates, faults: Faults, why: str) -> tuple[Solved, Loads, Traffic, str] | str:
    """solver events by a smaller plan, or why not."""
    if rates.plan.ranks <= LEAST:
        return "few ranks"
    if faults or rates.machine.jitter:
        return "slow ranks, stalls and jitter have no copies in a smaller plan"
    return folded(rates, why)


def _check_stalls(found: Problem, faults: Faults) -> None:
    for stall in faults.stalls:
        if stall.step >= found.steps:
            raise InvalidInput(f"{stall}: the pass has the steps 0 .. {found.steps - 1}")


def _noise_of_events(rates: Rates, faults: Faults, seed: int) -> Sampled | None:
    if not rates.machine.jitter:
        return None
    source = np.random.default_rng(seed)
    return repeated(
        lambda: events(rates, faults, noise=source)[0].seconds, f"runs of every step of every rank, seed {seed}"
    )


def _bounded(rates: Rates, found: Problem, solved: Solved) -> tuple[float, dict[str, float]]:
    """Causes where only the busiest rank's time is known."""
    longest = Loads.none(1)
    for phase in found.ring.each():
        longest.add(found.ring, phase)
    _, exposed = longest.causes(solved.seconds)
    mean = rates.pair * rates.plan.pairs() / rates.plan.ranks
    return mean, {**exposed, "imbalance": float(longest.compute[0]) - mean}


def _timeline(
    rates: Rates, solved: Solved, compared: str, compute: float, exposed: dict[str, float], traffic: Traffic | None,
    noise: Sampled | None, passes: int | None,
) -> Timeline:  # fmt: skip
    plan, machine, seconds = rates.plan, rates.machine, solved.seconds
    name, why, interval = solved.solver, solved.why, None
    exposed = {**exposed, "jitter": 0.0, "call": machine.call or 0.0}
    if noise is not None:
        # Times are maxima of sums: their mean is at least the time of the means, but for interference, which ends with the
        # message; never less than what a rank computes.
        least = seconds if not machine.gamma else compute
        noise = noise.at_least(least)
        exposed["jitter"], seconds = noise.seconds - seconds, noise.seconds
        name, why, interval = (
            f"{name} + jitter",
            f"{why}; jitter: {noise.why}",
            (noise.low + exposed["call"], noise.high + exposed["call"]),
        )
    seconds += exposed["call"]
    failed = None if passes is None else failures(plan, machine, passes * seconds, backward=rates.backward)
    total = (passes or 1) * seconds if failed is None else failed.expected
    return Timeline(
        direction="backward" if rates.backward else "forward",
        ranks=plan.ranks,
        seconds=seconds,
        solver=name,
        why=why,
        compared=compared,
        finish=solved.finish,
        compute=compute,
        exposed=exposed,
        interval=interval,
        extrapolated=noise is not None and noise.extrapolated,
        traffic=traffic,
        memory=memory(plan, backward=rates.backward),
        passes=passes,
        failures=failed,
        joules=energy(machine, plan.ranks, total),
        price=cost(machine, plan.ranks, total),
        machine=machine,
        notes=note_assumptions(plan, machine),
    )
