"""Attentions whose bits are compared over ranks, layouts, schedules, orders of visits and threads, see `plan.leaves`.

python tests/helpers/leaf_cases.py 2000 0    # at least so many runs of random attentions, and the seed
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Result, make_case, solve

import ringattn as ra
from ringattn import Causal, Documents, Full, Pattern, Sinks, Strided, Window
from ringattn.runtime import ring
from ringattn.transport.base import Program

TOKENS = 203
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
HEADS = ((1, 1), (2, 1), (4, 2), (4, 4), (6, 2), (8, 4))


@dataclass(frozen=True)
class Cell:
    """An attention of `tokens` tokens in leaves of `length`, and how many heads share how many."""

    pattern: Pattern
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    dim: int = 16
    value_dim: int | None = None
    options: tuple[str, ...] = ()
    length: int = 24
    tokens: int = TOKENS

    @property
    def given(self) -> dict[str, Any]:
        """The options of the call."""
        of: dict[str, Any] = {"reference": {"kernel": "reference"}, "softcap": {"softcap": 3.0}}
        of["dropout"] = {"dropout": ra.Dropout(0.3, 5)}
        found = {key: value for option in self.options for key, value in of.get(option, {}).items()}
        if "padding" in self.options:
            found["key_padding_mask"] = torch.rand(2, self.tokens, generator=torch.Generator().manual_seed(1)) < 0.3
        if "sinks" in self.options:
            found["sinks"] = torch.linspace(-2.0, 2.0, self.heads[0]).requires_grad_()
        return {"reproducible": self.length, **found}


def runs(cell: Cell, pick: random.Random, counts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Options of runs on these numbers of ranks."""
    layouts = ["contiguous", "zigzag", f"leaves(striped(1), {cell.length})"]
    layouts += ["balanced"] * ("documents" not in repr(cell.pattern).lower())
    for ranks in counts:
        schedules = ["direct", "ring", "allgather", "auto"] + ["double_ring(2)", "double_ring(2)"] * (ranks % 2 == 0)
        same = cell.pattern.run("keys", 0, 0) is not None  # in all heads
        schedules += [
            f"ulysses({size}, {inner})"
            for size in (2, 4)
            for inner in ("ring", "direct", "allgather")
            if same and ranks % size == 0 and cell.heads[1] % size == 0
        ]
        yield {"ranks": ranks, "layout": pick.choice(layouts), "schedule": pick.choice(schedules)}


def bits(result: Result) -> list[torch.Tensor]:
    found = (result.out, result.lse, *result.grads[:3])
    return [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in found]


def differs(one: Result, other: Result) -> list[str]:
    """The results that are not equal bit for bit."""
    pairs = zip(("out", "lse", "dq", "dk", "dv"), bits(one), bits(other), strict=True)
    return [name for name, a, b in pairs if not torch.equal(a, b)]


@contextmanager
def shuffling(pick: random.Random) -> Iterator[None]:
    """Visits of a step are computed in random order."""
    turn = ring.turn

    def shuffle(run: Any, *arguments: Any, **named: Any) -> Program[None]:
        run.steps = [replace(step, visits=tuple(pick.sample(step.visits, len(step.visits)))) for step in run.steps]
        return turn(run, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "turn", shuffle)
        yield


def compare(
    cell: Cell, pick: random.Random, counts: Iterable[int] = range(1, 9)
) -> tuple[Result, dict[str, list[str]]]:
    """(the results of one process, what differs from them in each run)."""
    case = make_case(cell.tokens, *cell.heads, cell.dtype, dim=cell.dim, value_dim=cell.value_dim, lse=True)
    one, found, threads = solve(ra.attention, case, cell.pattern, **cell.given), dict[str, list[str]](), 0
    before = torch.get_num_threads()
    try:
        with shuffling(pick):
            for options in runs(cell, pick, counts):
                torch.set_num_threads(1 + (threads := threads + 1) % 2)
                many = solve(ra.virtual_attention, case, cell.pattern, **options, **cell.given)
                found[str(options)] = differs(many, one)
    finally:
        torch.set_num_threads(before)
    return one, found


def draw(pick: random.Random) -> Cell:
    """A random attention."""
    tokens = pick.choice((pick.randint(1, 40), pick.randint(41, 200), pick.randint(201, 500)))
    heads, length = pick.choice(HEADS), pick.choice((16, 24, 32, 33, 50, 64, 100, 128))
    numbers = np.random.default_rng(pick.randrange(1 << 30))

    def simple() -> tuple[str, Pattern]:
        block, width = pick.randint(3, 20), pick.randint(0, 90)
        blocks = -(-tokens // block)
        cuts = sorted(pick.randint(0, tokens) for _ in range(pick.randint(0, 6)))
        table = numbers.random((pick.choice((1, heads[0])), blocks, blocks)) < 0.4
        made: dict[str, Any] = {
            "full": Full, "causal": Causal, "window": lambda: Window(width, pick.randint(0, 20)),
            "sinks": lambda: Sinks(pick.randint(0, 9)) | Window(width), "strided": lambda: Strided(pick.randint(1, 6)),
            "documents": lambda: Documents(np.diff([0, *cuts, tokens]).tolist()),
            "dilated": lambda: ra.Dilated((16, 64), (1, 2), mix="union"),
            "blocks": lambda: ra.BlockSparse(block, table), "local": lambda: ra.local_window(block, width // 20),
            "dilated blocks": lambda: ra.dilated_blocks(block, (0, 1, 4)),
            "strided blocks": lambda: ra.strided_blocks(block, 3),
            "global": lambda: ra.global_local(block, globals=1, blocks=2),
            "hierarchical": lambda: ra.hierarchical(block, ((1, 2), (4, 3))),
        }  # fmt: skip
        name = pick.choice([*made])
        return name, made[name]()

    name, pattern = simple()
    if pick.random() < 0.6:
        pattern = pattern & Causal()
    if pick.random() < 0.2:
        pattern = pattern | simple()[1] if pick.random() < 0.5 else pattern & simple()[1]
    chances = {"padding": 0.3, "sinks": 0.2, "softcap": 0.1, "dropout": 0.1, "reference": 0.1}
    options = tuple(option for option, chance in chances.items() if pick.random() < chance)
    dim = pick.choice((8, 16, 24, 40, 64, 128))
    return Cell(
        pattern, pick.choice(DTYPES), heads, dim, pick.choice((None, None, 12, 48)), (name, *options), length, tokens
    )


def main(least: int, seed: int) -> int:
    """Compare random attentions; prints what differs, and returns in how many runs something does."""
    pick, count, bad, kinds, begun = random.Random(seed), 0, 0, Counter[str](), time.monotonic()
    while count < least:
        cell = draw(pick)
        _, found = compare(cell, pick)
        count += len(found)
        kinds.update((*cell.options, str(cell.dtype)))
        for options, names in found.items():
            bad += bool(names)
            if names:
                print(cell, options, names, flush=True)
        if count % 200 < len(found) or count >= least:
            print(f"{count} runs, {bad} differ, {time.monotonic() - begun:.0f} s: {dict(kinds)}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(*(int(x) for x in sys.argv[1:])) > 0)
