"""After how many tokens a mask repeats along its diagonal."""

from __future__ import annotations

from functools import singledispatch
from math import lcm

from .base import And, Mix, Or, Pattern
from .causal import Causal
from .dilated import Dilated
from .families import GlobalLocal, LocalWindow, StridedBlocks
from .full import Full
from .levels import DilatedBlocks, Hierarchical
from .strided import Strided
from .window import Window


@singledispatch
def period(pattern: Pattern) -> int | None:
    """The least t known such that query q sees key k, of every head and as often, iff q + t sees k + t, whatever the
    length of the sequence that holds all four; None where there is none."""
    return None


@period.register
def _of_distance(pattern: Full | Causal | Window | Strided) -> int | None:
    return 1


@period.register
def _dilated(pattern: Dilated) -> int | None:
    # Classes are counted from the start of a segment, so that rates do not matter.
    return lcm(*pattern.segments)


@period.register
def _blocks(pattern: LocalWindow | StridedBlocks | DilatedBlocks) -> int | None:
    # A density is a number of blocks of the whole sequence, and fitted to its ends.
    return pattern.block if pattern.density is None else None


@period.register
def _globals(pattern: GlobalLocal) -> int | None:
    return pattern.block if pattern.density is None and not pattern.globals else None


@period.register
def _levels(pattern: Hierarchical) -> int | None:
    if pattern.density is not None or pattern.levels is None:
        return None
    return pattern.block * lcm(*(stride for stride, _ in pattern.levels))


@period.register
def _both(pattern: And | Or) -> int | None:
    return _common(pattern.a, pattern.b)


@period.register
def _several(pattern: Mix) -> int | None:
    return _common(*pattern.parts)


def _common(*parts: Pattern) -> int | None:
    found = [period(part) for part in parts]
    known = [one for one in found if one is not None]
    return lcm(*known) if len(known) == len(found) else None
