"""Three toys on the contract of kernels: one expands rows, one keeps leaves, one launches the visits of many ranks."""

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
from ringattn.kernels import get_kernel
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.kernels.calls import CallsPass
from ringattn.kernels.contract import CallData, KernelPass, QueryRows, Tensors
from ringattn.kernels.reference import Reference
from ringattn.plan.visit import Visit
from ringattn.plan.work import Work
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


class Expanding(Reference):
    """A kernel whose keys and values are expanded at the visit, `chunk` rows at a time, by weights [K, D, D]."""

    chunk, weights = 3, (torch.empty(0), torch.empty(0))

    @property
    def key(self) -> tuple[object, ...]:
        return Expanding, self.chunk

    def prepare(self, visits: Sequence[Visit], heads: int, rows: int, *, backward: bool) -> tuple[Sequence[Any], Any]:
        parts = [[*cut(visit, self.chunk)] for visit in visits]
        tables, unseen = super().prepare([part for of in parts for _, part in of], heads, rows, backward=backward)
        table = iter(tables)
        return [[(at, replace(part, table=next(table))) for at, part in of] for of in parts], unseen

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return ExpandingPass(super().begin(call, q, self.expand(block)), self)

    def expand(self, block: Tensors) -> Tensors:
        if all(torch.equal(weight, torch.eye(weight.shape[1]).to(weight).expand_as(weight)) for weight in self.weights):
            return block
        return tuple(x @ weight for x, weight in zip(block, self.weights, strict=True))


def cut(visit: Visit, size: int) -> Iterator[tuple[slice, Visit]]:
    """The visits of `size` key rows each that a visit consists of, and where these rows lie in its block."""
    last = max((run[-1] + 1 for work in visit.works for run in work.k), default=0)
    for start in range(0, last, size):
        works = [part for work in visit.works if (part := narrow(work, start, start + size)) is not None]
        if works:
            yield slice(start, start + size), replace(visit, works=works, first=True)


def narrow(work: Work, start: int, stop: int) -> Work | None:
    """The pairs of a work with key rows start .. stop - 1, which are then counted from `start`."""
    (run,) = work.k
    first, last = max(run.start, start), min(run.stop, stop)
    if first >= last:
        return None
    keys = (first - run.start, last - run.start)
    # Rows that see one of these keys.
    top = 0 if work.lo is None else max(0, keys[0] + work.lo)
    bottom = len(work.q) if work.hi is None else min(len(work.q), keys[1] + work.hi)
    if top >= bottom:
        return None
    part = work.narrow((top, bottom), keys)
    return replace(part, k=(range(first - start, last - start),))


class ExpandingPass(KernelPass):
    """The pass of `Expanding`, around one of the kernel that computes with the expanded rows."""

    #: The gradients of the weights of each backward pass.
    of_weights: ClassVar[list[tuple[Tensor, ...]]] = []
    most = 0

    def __init__(self, inner: KernelPass, kernel: Expanding) -> None:
        self.inner, self.kernel = inner, kernel
        self.new_sums, self.finish, self.new_grads = inner.new_sums, inner.finish, inner.new_grads  # type: ignore[method-assign]
        self.totals = tuple(torch.zeros_like(x) for x in kernel.weights)

    new_sums = finish = new_grads = lambda self, *_: None

    def finish_grads(self, grads: Any) -> Tensors:
        ExpandingPass.of_weights.append(self.totals)
        return self.inner.finish_grads(grads)

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        for at, part in visit.table:
            expanded = self.kernel.expand(tuple(x[:, :, at] for x in block))
            ExpandingPass.most = max(ExpandingPass.most, expanded[0].shape[2])
            self.inner.visit_forward(part, q, expanded, sums)

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: Any, travel: Tensors) -> None:
        for x in travel if visit.first else ():  # uninitialized
            x.zero_()
        for at, part in visit.table:
            kept = tuple(x[:, :, at] for x in block)
            sums = tuple(torch.full_like(x, torch.nan) for x in self.kernel.expand(kept))
            self.inner.visit_backward(part, rows, self.kernel.expand(kept), stay, sums)
            for total, of_weight, grad, weight, x in zip(
                travel, self.totals, sums, self.kernel.weights, kept, strict=True
            ):
                total[:, :, at] += grad @ weight.mT
                of_weight += (x.mT @ grad).sum(0)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_rows_expanded_at_the_visit(layout: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(TOKENS, 4, 2, torch.float64, lse=True, dim=8)
    pattern, options = ra.Causal(), {"ranks": 4, "layout": layout, "schedule": "ring", "rotate": "kv"}
    empty = torch.empty

    def not_a_number(*args: Any, **named: Any) -> Tensor:
        return empty(*args, **named).fill_(255)

    for same in (True, False):
        weights = [torch.eye(8, dtype=torch.float64).repeat(2, 1, 1) for _ in range(2)]
        weights = weights if same else [torch.randn(2, 8, 8, dtype=torch.float64) for _ in range(2)]
        leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, *weights)]
        q, k, v, wk, wv = leaves
        wide = replace(case, q=q, k=k @ wk, v=v @ wv)
        detached = replace(case, k=wide.k.detach(), v=wide.v.detach())
        truth = dense(detached, torch.from_numpy(pattern.mask(TOKENS, 4)))
        dk, dv, dwk, dwv = torch.autograd.grad((wide.k, wide.v), leaves[1:], truth.grads[1:])
        ExpandingPass.of_weights.clear()
        ExpandingPass.most = 0
        kernel = Expanding().derive(chunk=chunk, weights=tuple(weights))
        with monkeypatch.context() as patch:
            patch.setattr("ringattn.runtime.tensors.empty", lambda *args: not_a_number(args[0], dtype=args[1]))
            found = attend(kernel, case, pattern, monkeypatch, **options)
        assert ExpandingPass.most <= chunk and len(ExpandingPass.of_weights) == 4
        of_weights = [sum(parts) for parts in zip(*ExpandingPass.of_weights, strict=True)]
        expected = truth.out, truth.lse, truth.grads[0], dk, dv, dwk, dwv
        for one, other in zip((found.out, found.lse, *found.grads, *of_weights), expected, strict=True):
            assert error(one, other) < 1e-12
        if same and chunk >= TOKENS:  # the same calls; only dk and dv are summed in another order
            plain = attend(get_kernel("reference", *case.inputs), case, pattern, monkeypatch, **options)
            assert all(map(torch.equal, (found.out, found.lse, found.grads[0]), (plain.out, plain.lse, plain.grads[0])))


LEAF = 4


class Leaves(Reference):
    """A kernel that keeps a node for each leaf of queries and keys, and joins nodes in one tree, however they come."""

    by_arrival = False

    def prepare(self, visits: Sequence[Visit], heads: int, rows: int, *, backward: bool) -> tuple[Sequence[Any], Any]:
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
