"""Two toys on the contract of kernels: one keeps leaves, one launches the visits of many ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from oracle import Case, Result, dense, error, make_case, solve
from torch import Tensor

import ringattn as ra
from ringattn.call import compile as compiling
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.kernels.calls import CallsPass
from ringattn.kernels.contract import CallData, KernelPass, QueryRows, Tensors
from ringattn.kernels.reference import Reference
from ringattn.plan.visit import Visit
from ringattn.runtime import ring
from ringattn.transport.base import Compute, Program

TOKENS = 64


def attend(kernel: Any, case: Case, pattern: ra.Pattern, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Result:
    """`virtual_attention` with this kernel."""
    compiling._calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "get_kernel", lambda *args, **named: kernel)
        result = solve(ra.virtual_attention, case, pattern, **options)
    compiling._calls.clear()
    return result


class Together(AtenCpu):
    """AtenCpu, for which the ready visits of all virtual ranks are one launch."""

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return TogetherPass(self, call, q, block)


class TogetherPass(CallsPass):
    together = True
    key = "together"
    #: The number of visits of each launch, and the addresses of their blocks.
    launches: ClassVar[list[tuple[int, int]]] = []

    def launch(self, requests: Sequence[Compute]) -> None:
        blocks = {request.tensors[1][0].data_ptr() for request in requests}
        TogetherPass.launches.append((len(requests), len(blocks)))
        super().launch(requests)


@pytest.mark.parametrize(
    ("pattern", "layout", "ranks", "visits", "launches"),
    [
        (ra.Causal(), "zigzag", 8, 64, 8),
        (ra.Causal() & ra.Window(7), "contiguous", 8, 15, 2),
        (ra.Causal(), "zigzag", 16, 256, 16),
    ],
)
def test_ready_visits_of_all_ranks_are_one_launch(
    pattern: ra.Pattern, layout: str, ranks: int, visits: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(TOKENS * 2, 4, 2, torch.float32, lse=True)
    options: dict[str, Any] = {"ranks": ranks, "layout": layout, "schedule": "ring"}
    alone = solve(ra.virtual_attention, case, pattern, **options, rotate="kv")
    TogetherPass.launches.clear()
    found = attend(Together().derive(), case, pattern, monkeypatch, **options, rotate="kv")
    counts = TogetherPass.launches
    assert sum(count for count, _ in counts) == 2 * visits and len(counts) == 2 * launches  # both passes
    assert all(count == blocks for count, blocks in counts)
    for one, other in zip((alone.out, alone.lse, *alone.grads), (found.out, found.lse, *found.grads), strict=True):
        assert torch.equal(one, other)


LEAF = 4


class Leaves(Reference):
    """A kernel that keeps a node for each leaf of queries and keys, and joins nodes in one tree, however they come."""

    by_arrival = False

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        return [None] * len(visits), None

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return LeavesPass(self, call, q, block)


class LeavesPass(CallsPass):
    """The nodes of a rank's query leaves by number of the leaf of keys."""

    def __init__(self, kernel: Leaves, call: CallData, q: Tensor, block: Tensors) -> None:
        super().__init__(kernel, call, q, block)
        self.rows = call.places(call.stays)[1][0]

    def new_sums(self, out: Tensor | None) -> Any:
        self.out = out
        return {}

    def new_grads(self) -> Any:
        return {}

    def finish(self, sums: Any) -> Any:
        out, lse = self._join(sums, merge)
        return out if self.out is None else self.out.copy_(out), lse

    def finish_grads(self, grads: Any) -> Tensors:
        return self._join(grads, add)

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        for i, j, rows, keys, mask in self._leaves(visit):
            x, k, v = (y[:, :, at].contiguous() for y, at in ((q, rows), (block[0], keys), (block[1], keys)))
            logits = (x @ k.mT * self.call.scale).masked_fill(~mask, -torch.inf)
            lse = logits.logsumexp(-1)
            sums.setdefault(i, {})[j] = torch.exp(logits - lse.clamp(min=-1e30)[..., None]) @ v, lse

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: Any, travel: Tensors) -> None:
        for x in travel if visit.first else ():
            x.zero_()
        assert rows.out is not None
        for i, j, at, keys, mask in self._leaves(visit):
            q, grad, out, k, v = (
                y[:, :, where].contiguous()
                for y, where in ((rows.q, at), (rows.grad, at), (rows.out, at), (block[0], keys), (block[1], keys))
            )
            logits = (q @ k.mT * self.call.scale).masked_fill(~mask, -torch.inf)
            weights = torch.exp(logits - rows.lse[:, :, at, None])
            number = (grad * out).sum(-1, keepdim=True)
            if rows.grad_lse is not None:
                number = number - rows.grad_lse[:, :, at, None]
            products = weights * (grad @ v.mT - number) * self.call.scale
            stay.setdefault(i, {})[j] = (products @ k,)
            for total, part in zip(travel, (products.mT @ q, weights.mT @ grad), strict=True):
                total[:, :, keys] += part

    def _leaves(self, visit: Visit) -> Iterator[tuple[int, int, slice, slice, Tensor]]:
        keys = self.call.places(visit.part)[1][0]
        for first in range(0, len(self.rows), LEAF):
            for start in range(0, len(keys), LEAF):
                rows, columns = slice(first, first + LEAF), slice(start, start + LEAF)
                mask = self.rows[rows, None] >= keys[None, columns]
                if mask.any():
                    yield int(self.rows[first]) // LEAF, int(keys[start]) // LEAF, rows, columns, mask

    def _join(self, nodes: Any, operation: Callable[[Any, Any], Any]) -> Any:
        leaves = []
        for first in range(0, len(self.rows), LEAF):
            mine = nodes[int(self.rows[first]) // LEAF]
            if self.kernel.by_arrival:  # type: ignore[attr-defined]
                total, *others = mine.values()
                for other in others:
                    total = operation(total, other)
                leaves.append(total)
            else:
                leaves.append(tree(mine, 0, TOKENS // LEAF, operation))
        return tuple(torch.cat(parts, 2) for parts in zip(*leaves, strict=True))


def tree(nodes: dict[int, Any], first: int, last: int, operation: Callable[[Any, Any], Any]) -> Any:
    """The root over leaves first .. last - 1; None if there is none."""
    if last - first == 1:
        return nodes.get(first)
    middle = (first + last) // 2
    left, right = tree(nodes, first, middle, operation), tree(nodes, middle, last, operation)
    return left if right is None else right if left is None else operation(left, right)


def merge(one: Any, other: Any) -> Any:
    lse = torch.logaddexp(one[1], other[1])
    shares = (torch.exp(x[1] - lse)[..., None] for x in (one, other))
    return sum(x[0] * share for x, share in zip((one, other), shares, strict=True)), lse


def add(one: Any, other: Any) -> Any:
    return tuple(x + y for x, y in zip(one, other, strict=True))


def test_leaves_have_the_same_bits_on_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of out, lse and dq; dk and dv travel as sums, whose leaves would need messages of their own."""
    case = make_case(TOKENS, 2, 2, torch.float32, lse=True, dim=8)
    truth = dense(case, torch.from_numpy(ra.Causal().mask(TOKENS, 2)))
    pick, turn = random.Random(0), ring.turn

    def shuffled(run: Any, *args: Any, **named: Any) -> Program[None]:
        run.steps = [replace(step, visits=pick.sample(step.visits, len(step.visits))) for step in run.steps]
        return turn(run, *args, **named)

    monkeypatch.setattr(ring, "turn", shuffled)
    found: dict[bool, list[Result]] = {False: [], True: []}
    for by_arrival, results in found.items():
        for ranks in (1, 2, 4, 8) if not by_arrival else (2, 4):
            for layout, schedule in (("contiguous", "ring"), ("zigzag", "allgather")):
                options: dict[str, Any] = {"ranks": ranks, "layout": layout, "schedule": schedule, "rotate": "kv"}
                kernel = Leaves().derive(by_arrival=by_arrival)
                results.append(attend(kernel, case, ra.Causal(), monkeypatch, **options))
                assert error(results[-1].out, truth.out) < 1e-5
                assert all(error(*pair) < 1e-5 for pair in zip(results[-1].grads, truth.grads, strict=True))
    for by_arrival, results in found.items():
        bits = [(x.out, x.lse, x.grads[0]) for x in results]
        same = all(torch.equal(a, b) for other in bits[1:] for a, b in zip(bits[0], other, strict=True))
        assert same == (not by_arrival)
