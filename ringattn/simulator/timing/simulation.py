"""`simulate`: the modelled time of a plan on a machine, by the cheapest solver that is exact for the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...dtypes import check_type
from ...errors import InvalidInput, Unsupported
from ...machine.machine import Machine
from ...machine.presets import get_machine
from ...plan.plan import Plan
from ...text import did_you_mean, shown
from .costs import SECONDS_PER_HOUR, failures, memory
from .forecast import host_seconds
from .kernel_seconds import timed_ranks
from .problem import TimingProblem, make_ring_problem
from .rates import FEW_RANKS, Factors, Faults, Rates, own_bytes, parse_factors
from .solvers.base import Solved, solve_ring
from .solvers.event_loop import rank_steps
from .solvers.events import solve_by_events
from .solvers.periodic import solve_periodic
from .solvers.recurrence import Stall
from .solvers.stencil import solve_by_stencil
from .timeline import Timeline, note_assumptions

#: The most ranks of a plan, and the most bytes of all their tensors: messages are counted in 64 bits.
MOST_OF_ANY, MOST_BYTES = 1 << 24, 1 << 58
#: More passes than this must be a mistake: even at a microsecond each they would take 30 years.
MOST_PASSES = 10**15
#: Solvers by name, the cheapest first: (function that returns None if the problem lacks what it needs, that need).
SOLVERS: dict[str, tuple[Callable[[TimingProblem], Solved | None], str]] = {
    "periodic": (
        lambda problem: solve_ring("periodic", problem, solve_periodic),
        "ranks that repeat with a period, and no stalls",
    ),
    "stencil": (solve_by_stencil, "a ring whose numbers are known for all ranks at once"),
    "events": (solve_by_events, "a plan of a few thousand ranks"),
}


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
) -> Timeline:
    """Model the time of a forward, or of a backward, of `plan` on `machine` (a Machine, "cpu" or "cuda").

    `slow` gives factors on the time that each rank computes (a dict by rank, or one factor per rank), `slow_links`
    factors on the messages that each rank sends, and `stalls` single delays. `passes` defines a job: how often it makes
    the pass. Energy and cost are those of the job, with its failures and checkpoints; without a job, of one pass.

    `solver` selects an algorithm (periodic, stencil or events) instead of the cheapest exact one. Solver events may
    simulate a smaller plan with the same times. Raises InvalidInput for wrong arguments, and Unsupported if no solver
    can model the request.
    """
    _check_options(plan, backward, stalls, passes, solver)
    machine = get_machine(machine)
    slow_factors = parse_factors("slow", slow, plan.ranks)
    link_factors = parse_factors("slow_links", slow_links, plan.ranks)
    rates, faults = Rates(plan, machine, backward), Faults(slow_factors, link_factors, tuple(stalls))
    problem = TimingProblem(rates, faults, make_ring_problem(rates, faults))
    return _make_timeline(rates, _solve(problem, solver), passes, _host_seconds(problem))


def simulate_passes(plan: Plan, machine: Machine, backward: bool, options: dict[str, Any]) -> list[Timeline]:
    """The timelines of the forward and, if `backward` is set, of the backward."""
    directions = (False, True) if backward else (False,)
    return [simulate(plan, machine, backward=direction, **options) for direction in directions]


def _check_options(plan: Plan, backward: object, stalls: Sequence[Stall], passes: int | None, solver: str) -> None:
    check_type("plan", plan, "Plan")
    check_type("stalls", stalls, "Sequence")
    check_type("passes", passes, "int | integer | None")
    choices = ("auto", *SOLVERS)
    if solver not in choices:
        raise InvalidInput(
            f"solver={shown(solver)}: {did_you_mean(solver, choices)}expected one of {', '.join(choices)}"
        )
    if not isinstance(backward, bool):
        raise InvalidInput(f"backward={shown(backward)}: expected True or False")
    held = own_bytes(plan)
    if plan.ranks > MOST_OF_ANY or held * plan.ranks > MOST_BYTES:
        raise InvalidInput(
            f"{plan.ranks:,} ranks with {held:,} bytes each: must be at most {MOST_OF_ANY:,} ranks with "
            f"{MOST_BYTES:,} bytes in total; try fewer ranks or tokens"
        )
    if not plan.batch:
        raise InvalidInput("batch=0: there is nothing to simulate; try batch=1")
    if passes is not None and not 1 <= passes <= MOST_PASSES:
        raise InvalidInput(
            f"passes={shown(passes)}: expected the number of passes of a job, 1 .. {MOST_PASSES:.0e}, or None"
        )
    for stall in stalls:
        if not isinstance(stall, Stall):
            raise InvalidInput(f"stalls: {shown(stall)} is not a Stall(rank, step, seconds)")
        if not (0 <= stall.rank < plan.ranks and stall.step >= 0 and 0 <= stall.seconds < float("inf")):
            raise InvalidInput(f"{stall}: expected a rank 0 .. {plan.ranks - 1}, a step >= 0 and seconds >= 0")


def _solve(problem: TimingProblem, solver: str) -> Solved:
    """The result of the named solver, or with "auto" of the first solver that can solve the problem."""
    for solve in (solve for name, (solve, _) in SOLVERS.items() if solver in ("auto", name)):
        solved = solve(problem)
        if solved is not None:
            return solved
    obstacle = f"but {problem.ring}" if isinstance(problem.ring, str) else "which this plan on this machine lacks"
    raise Unsupported(f"solver={solver} needs {SOLVERS[solver][1]}, {obstacle}; try solver=auto")


def _host_seconds(problem: TimingProblem) -> float:
    """Seconds that the host needs to start all calls of a pass, on the rank with the most; sampled on many ranks."""
    plan, machine = problem.rates.plan, problem.rates.machine
    if plan.ranks == 1 or (not machine.host and not machine.host_call):
        return 0.0
    if not isinstance(problem.ring, str):
        calls = problem.ring.calls
    else:
        ranks = range(plan.ranks) if plan.ranks <= FEW_RANKS else timed_ranks(plan.ranks)
        met = [[{part.owner for part in step.visits} for step in rank_steps(problem.rates, rank)] for rank in ranks]
        calls = max(sum(1 if problem.rates.one_gather else max(len(owners), 1) for owners in each) for each in met)
    return host_seconds(plan.ranks, machine, calls)


def _make_timeline(rates: Rates, solved: Solved, passes: int | None, host: float) -> Timeline:
    """The timeline of a solved problem, with `host` seconds, and the job's failures, energy and cost."""
    plan, machine, seconds = rates.plan, rates.machine, solved.seconds
    compute, exposed = solved.loads.causes(seconds, solved.peers)
    exposed |= {"host": 0.0, "call": rates.call}
    exposed["host"] = max(host - seconds, 0.0)
    seconds += exposed["host"] + exposed["call"]
    job_failures = None if passes is None else failures(plan, machine, passes * seconds, backward=rates.backward)
    total = (passes or 1) * seconds if job_failures is None else job_failures.expected
    return Timeline(
        direction="backward" if rates.backward else "forward",
        ranks=plan.ranks,
        seconds=seconds,
        solver=solved.solver,
        why=solved.why,
        finish=np.maximum(solved.finish, host) + rates.call,
        compute=compute,
        exposed=exposed,
        traffic=solved.traffic,
        memory=memory(plan, backward=rates.backward),
        passes=passes,
        failures=job_failures,
        # Ranks draw power and cost money whether they are busy or not.
        joules=None if machine.watts is None else machine.watts * plan.ranks * total,
        price=None if machine.price is None else machine.price * plan.ranks * total / SECONDS_PER_HOUR,
        machine=machine,
        notes=note_assumptions(plan, machine),
    )
