"""`reproducible=L`: the same bits for any number of ranks, layout, schedule, order of visits, and number of threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from leaf_cases import TOKENS, Cell, compare, differs, shuffling
from oracle import Case, Result, dense, errors, make_case, same_lse, solve, truth_of
from posts import find_violation, planned_posts

import ringattn as ra
from ringattn import Causal, Documents, Full, InvalidInput, Plan, Sinks, Unsupported, Window, make_plan
from ringattn.kernels import leaves, softmax
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.kernels.memory import expand_heads
from ringattn.plan.leaves import Tree
from ringattn.simulator.numerics import numerics

LENGTHS = (16, 24, 33, 64)
TABLE = np.random.default_rng(0).random((4, 16, 16)) < 0.4
#: Dtype, and the largest error that the option may have.
TOLERANCES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.float16: 2e-3}


CELLS = {
    "causal": Cell(Causal()),
    "bf16": Cell(Causal(), torch.bfloat16, (6, 2)),
    "fp64": Cell(Causal() & Window(50), torch.float64, (4, 4)),
    "fp16": Cell(Window(30, 9), torch.float16, (2, 1), 20),
    "full, other width of v": Cell(Full(), value_dim=12),
    "documents": Cell(Causal() & Documents([1, 70, 33, 0, 99]), options=("padding",)),
    "sinks": Cell(Causal() & (Sinks(3) | Window(20)), options=("sinks",)),
    "blocks of heads": Cell(Causal() & ra.BlockSparse(13, TABLE), heads=(4, 4)),
    "dilated": Cell(ra.Dilated((16, 64), (1, 2), mix="union"), heads=(4, 2), options=("padding",)),
    "reference": Cell(Causal() & ra.Strided(3), options=("reference", "sinks")),
    "softcap": Cell(Causal() & Window(50), torch.bfloat16, options=("softcap",)),
    "dropout": Cell(Causal(), heads=(8, 4), options=("dropout", "padding")),
    "a leaf of keys that nobody sees": Cell(Causal() & ra.BlockSparse(16, TABLE[:1, :13, :13] & (np.arange(13) != 5))),
}


@pytest.mark.parametrize("name", CELLS)
def test_bits_are_those_of_one_process_and_errors_no_larger(name: str) -> None:
    cell = replace(CELLS[name], length=LENGTHS[[*CELLS].index(name) % len(LENGTHS)])
    pick = random.Random(name)
    one, found = compare(cell, pick, pick.sample(range(2, 9), 3))
    assert not any(found.values()), found
    if "padding" in cell.options or "sinks" in cell.options:
        return
    case = make_case(TOKENS, *cell.heads, cell.dtype, dim=cell.dim, value_dim=cell.value_dim, lse=True)
    plain = solve(ra.attention, case, cell.pattern, **{**cell.given, "reproducible": None})
    truth = truth_of(case, cell.pattern, partial(dense, softcap=cell.given.get("softcap")))
    for mine, usual in zip(errors(one, truth), errors(plain, truth), strict=True):
        assert mine <= max(1.5 * usual, TOLERANCES[cell.dtype])
    same_lse(one.lse, truth.lse, TOLERANCES[cell.dtype])


def test_packing_changes_no_bits() -> None:
    """A document has the same bits alone, and at any place among others."""
    case = make_case(TOKENS, 4, 2, torch.float32)
    lengths = [37, 90, 76]
    both = Documents(lengths)
    packed = solve(ra.virtual_attention, case, Causal() & both, ranks=3, layout="zigzag", reproducible=16)
    for start, length in zip(both.starts, lengths, strict=False):
        part = slice(start, start + length)
        alone = Case(*(x[:, :, part].clone() for x in (*case.inputs, case.grad)))
        one = solve(ra.attention, alone, Causal(), reproducible=16)
        cut = Result(packed.out[:, :, part], packed.lse[:, :, part], tuple(x[:, :, part] for x in packed.grads))
        assert not differs(cut, one)


# Planted dependences


class ByArrival(Tree[Any]):
    """Joins nodes in the order in which they come."""

    def put(self, level: int, index: int, node: Any) -> None:
        self.came = getattr(self, "came", 0) + 1
        old = self.nodes.pop((self.top, 0) if self.came > sum(map(len, self.seen)) else (-1, 0), None)
        node = node if old is None else self.join(old, node)
        self.nodes[(self.top, 0) if self.came == sum(map(len, self.seen)) else (-1, 0)] = node


class ClosedEarly(Tree[Any]):
    """Joins a node with the next one that is there, and does not wait for its other half."""

    def put(self, level: int, index: int, node: Any) -> None:
        self.came = getattr(self, "came", 0) + 1
        for name in [name for name in self.nodes if name[0] == level][:1]:
            node, level = self.join(self.nodes.pop(name), node), level + 1
        self.nodes[level, index] = node
        if self.came == sum(map(len, self.seen)):
            total, *others = self.nodes.values()
            for other in others:
                total = self.join(total, other)
            self.nodes = {(self.top, 0): total}


class Centred(AtenCpu):
    """Subtracts a key from all keys."""

    own: torch.Tensor

    def forward(self, q: Any, k: Any, v: Any, work: Any, scale: float) -> Any:
        out, lse = super().forward(q, k - self.own, v, work, scale)
        return out, lse + (q * expand_heads(self.own, q.shape[1])).sum(-1) * scale


def plant_tree(monkeypatch: pytest.MonkeyPatch, tree: type[Tree[Any]]) -> None:
    monkeypatch.setattr(leaves, "Tree", tree)
    give = leaves.LeafPass._send

    def home(self: Any, visit: Any, columns: Any, travel: Any) -> None:  # gradients of blocks are left out
        if visit.nodes is None:
            return give(self, visit, {}, travel)
        return [x.zero_() for x in travel] and None

    monkeypatch.setattr(leaves.LeafPass, "_send", home)
    monkeypatch.setattr(leaves.BlockGrads, "join", lambda *_: None)


def plant_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual merge, in which the sides differ, with those that came first on the left."""

    def put(self: Tree[Any], level: int, index: int, node: Any) -> None:
        while level < self.top:
            other = self.nodes.pop((level, index ^ 1), None)
            if other is not None:
                node = self.join(other, node)
            elif any(run.start >> level <= index ^ 1 <= run[-1] >> level for run in self.seen):
                break
            level, index = level + 1, index >> 1
        self.nodes[level, index] = node

    monkeypatch.setattr(Tree, "put", put)
    monkeypatch.setattr(leaves, "join_", softmax.merge)


def plant_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = leaves.LeafPass.__init__

    def init(self: Any, kernel: Any, call: Any, q: Any, block: Any) -> None:
        begin(self, kernel, call, q, block)
        self.kernel = Centred().derive(own=block[0][:, :, :1])

    monkeypatch.setattr(leaves.LeafPass, "__init__", init)


def plant_tail(monkeypatch: pytest.MonkeyPatch, formula: Callable[..., Any] = softmax.merge) -> None:
    """Rows are merged in two parts, whose border moves on from node to node, as it does where ranks merge shards."""
    cuts = count()

    def join(*tensors: torch.Tensor) -> Any:
        cut = 1 + next(cuts) % 13
        parts = (formula(*(x[:, :, rows] for x in tensors)) for rows in (slice(None, cut), slice(cut, None)))
        return tuple(torch.cat(both, 2) for both in zip(*parts, strict=True))

    monkeypatch.setattr(leaves, "join_", join)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "order of arrival": (partial(plant_tree, tree=ByArrival), {"out", "lse", "dq"}),
    "a tree closed early": (partial(plant_tree, tree=ClosedEarly), {"out", "lse", "dq"}),
    "sides swapped": (plant_sides, {"out"}),
    "a local centre": (plant_centre, {"out", "lse"}),
    "a scalar tail": (plant_tail, {"out", "lse"}),
    "no scalar tail": (partial(plant_tail, formula=softmax.join_), set()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_dependences_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, wanted = FAULTS[fault]
    plant(monkeypatch)
    case = make_case(TOKENS, 4, 2, torch.float64, batch=1)
    sinks = torch.linspace(-2.0, 2.0, 4).requires_grad_()
    call = partial(solve, ra.virtual_attention, case, Causal(), reproducible=16, sinks=sinks, schedule="direct")
    one = call(ranks=1)
    with shuffling(random.Random(0)):
        found = {name for ranks in (2, 3, 5) for name in differs(call(ranks=ranks, layout="zigzag"), one)}
    assert wanted <= found and bool(wanted) == bool(found)


def test_sides_of_a_node_are_of_no_account() -> None:
    source = torch.Generator().manual_seed(0)
    one, other = (
        (torch.randn(1, 2, 50, 7, generator=source), torch.randn(1, 2, 50, generator=source).double() * 9)
        for _ in range(2)
    )
    one[1][:, :, :5] = -torch.inf
    other[1][:, :, 3:9] = -torch.inf
    (out, lse), (part, part_lse) = one, other
    swapped = softmax.join_(part.clone(), part_lse, out, lse)
    assert all(map(torch.equal, softmax.join_(out.clone(), lse, *other), swapped))
    kept = softmax.join_(out.clone(), lse, torch.zeros(()), torch.full_like(one[1], -torch.inf))
    rows = one[1].isfinite()
    assert torch.equal(kept[0][rows], one[0][rows]) and torch.equal(kept[1], one[1])


# Plans


@pytest.mark.parametrize("schedule", ["direct", "ring", "allgather", "double_ring(2)", "ulysses(2, ring)"])
def test_plans_count_nodes_and_read_back(schedule: str) -> None:
    sizes: dict[str, Any] = {"tokens": TOKENS, "ranks": 4, "heads": 4, "head_dim": 8, "layout": "zigzag"}
    plan = make_plan(Causal() & Documents([50, 153]), schedule=schedule, reproducible=16, **sizes)
    assert Plan.from_json(plan.to_json()) == plan and plan.reproducible == 16
    posts = [planned_posts(plan, rank, backward=True) for rank in range(4)]
    sent = sum(op.size for batches in posts for batch in batches for op in batch if op.sends)
    assert sent == plan.bytes_sent(backward=True) and find_violation(posts) is None
    listed = [line for line in str(plan.listing(2)).splitlines() if "grad of" in line and line.endswith(" B")]
    assert listed and all("of trees" in line for line in listed)
    timeline = ra.simulate(plan, "cpu", backward=True)
    assert timeline.traffic.total == sent


def test_nodes_of_contiguous_shards_are_one_a_leaf() -> None:
    """Shards that are whole subtrees send no more than the usual plan, zigzag shards a third more."""
    sizes: dict[str, Any] = {"tokens": 1024, "ranks": 8, "heads": 1, "head_dim": 8, "schedule": "direct"}
    for layout, factor in (("contiguous", 1.0), ("zigzag", 4 / 3)):
        plain, mine = (make_plan(Causal(), layout=layout, reproducible=x, rotate="kv", **sizes) for x in (None, 64))
        assert mine.bytes_sent() == plain.bytes_sent()
        grads = [plan.bytes_sent(backward=True) - plan.bytes_sent() for plan in (plain, mine)]
        assert layout == "contiguous" or grads[1] > grads[0]
        assert mine.bytes_sent(backward=True) <= factor * plain.bytes_sent(backward=True) + 1


def test_layouts_of_leaves() -> None:
    layout = ra.make_layout(" leaves( zigzag,16 )", tokens=100, ranks=2)
    assert layout.name == "leaves(zigzag, 16)" and layout == ra.make_layout(layout.name, tokens=100, ranks=2)
    assert [layout.shard(rank) for rank in range(2)] == [(range(0, 16), range(80, 100)), (range(16, 80),)]
    packed = ra.make_layout("leaves(contiguous, 16)", tokens=100, ranks=2, pattern=Documents([20, 80]))
    assert packed.shard(1) == (range(36, 100),) and packed.digest
    striped = ra.make_layout("leaves(striped(1), 16)", tokens=70, ranks=2)
    assert striped.shard(1) == (range(16, 32), range(48, 64)) and [striped.owner(x) for x in (0, 16, 69)] == [0, 1, 0]
    for name in ("leaves(zigzag)", "leaves(balanced, 16)", "leaves(zigzag, 0)"):
        with pytest.raises(InvalidInput, match="expected leaves\\(zigzag, 64\\)"):
            ra.make_layout(name, tokens=100, ranks=2)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "striped": ({"layout": "striped"}, "the layout striped\\(1\\) cuts leaves: rank 0 has positions 0 .. 98 in steps"),
    "borders": ({"layout": "rows(50, 50)"}, "cuts leaves: rank 0 has positions 0 .. 49; try make_layout\\('leaves"),
    "auto": ({"layout": "auto"}, "layout='auto': name a layout"),
    "comm_dtype": ({"comm_dtype": "bfloat16"}, "comm_dtype='bfloat16' rounds sums by hop; leave out one"),
    "rotate": ({"rotate": "q"}, "rotate='q' moves queries; leave out one"),
    "copies": ({"schedule": "ulysses(2)", "k": 1}, "sums copies of 1 key/value heads; try schedule='direct'"),
    "mix": ({"pattern": ra.mix(Causal(), Window(3))}, "takes patterns of one softmax"),
    "heads": ({"schedule": "ulysses(2)", "pattern": ra.Strided(3)}, "whose heads may differ"),
    "rows of documents": ({"pattern": Documents([[40, 60], [100]])}, "no documents of each batch row"),
    "queries": ({"q_layout": "contiguous"}, "needs queries and keys at the same positions"),
    "kernel": ({"kernel": "flash_attn"}, "kernel flash_attn has no reproducible"),
    "length": ({"reproducible": 0}, "reproducible=0 must be an integer >= 1"),
    "type": ({"reproducible": 2.0}, "reproducible=2.0: expected int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(name: str) -> None:
    options, message = REFUSED[name]
    options = {"ranks": 2, "reproducible": 16, "pattern": Causal(), "k": 2, **options}
    q, k = torch.randn(2, 2, 100, 8), torch.randn(2, options.pop("k"), 100, 8)
    with pytest.raises((InvalidInput, Unsupported), match=message) as caught:
        ra.virtual_attention(q, k, k, options.pop("pattern"), **options)
    assert "\n" not in str(caught.value)


def test_other_paths_refuse_it() -> None:
    q = torch.randn(1, 2, 64, 8)
    with pytest.raises(Unsupported, match="offload='host' cuts by memory"):
        ra.attention(q, q, q, Causal(), reproducible=16, offload="host", device="cpu")
    with pytest.raises(Unsupported, match="affine_scan has no reproducible="):
        ra.affine_scan(torch.rand(1, 64, 2), torch.rand(1, 64, 2), ranks=2, reproducible=16)  # type: ignore[call-arg]
    with pytest.raises(Unsupported, match="the ledger counts works, not leaves"):
        numerics(make_plan(Causal(), tokens=64, ranks=2, dtype="float64", reproducible=16))
    rows = ra.Rows(torch.randn(1, 1, 64, 4), expand=lambda x: (x.expand(-1, 2, -1, -1),) * 2)
    with pytest.raises(InvalidInput, match="expands rows by visit"):
        ra.virtual_attention(torch.randn(1, 2, 64, 4), rows, Causal(), ranks=2, reproducible=16)
    chosen = torch.zeros(1, 1, 64, 2, dtype=torch.int64)
    with pytest.raises(Unsupported, match="bits with chosen= depend on the shards"):
        ra.virtual_attention(q, q, q, Causal(), ranks=2, reproducible=16, chosen=chosen)


def test_modules_take_it() -> None:
    case = make_case(96, 4, 2, torch.float32)
    wanted = solve(ra.attention, case, Causal(), reproducible=32)
    for module in (
        ra.nn.RingAttention(Causal(), reproducible=32),
        ra.nn.RingAttention(Causal(), ranks=3, reproducible=32),
    ):
        out, lse = module(*case.inputs, return_lse=True)
        assert torch.equal(out, wanted.out) and torch.equal(lse, wanted.lse)


def test_nodes_that_wait_keep_no_results_of_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    visit, waiting = leaves.LeafPass.visit_forward, list[torch.Tensor]()

    def look(self: Any, one: Any, q: Any, block: Any, sums: Any) -> None:
        visit(self, one, q, block, sums)
        waiting.extend(x for tree in sums.trees.values() for node in tree.nodes.values() for x in node)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in waiting)

    monkeypatch.setattr(leaves.LeafPass, "visit_forward", look)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    ra.virtual_attention(q, k, v, Causal(), ranks=3, layout="zigzag", reproducible=16)
    assert waiting
