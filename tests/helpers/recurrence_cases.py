"""Random calls of recurrent layers, and an oracle that steps through every document token by token in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rank_pool import of_first, told_by
from torch import Tensor

import ringattn as ra
from ringattn import Documents
from ringattn.call.functional import get_transport
from ringattn.layout.regular import Layout, make_layout
from ringattn.recurrence.runs import list_runs, plan_rows, plan_states

#: Kinds of calls; "kda" and "matrix" are options of a function.
KINDS = ("gated_delta_rule", "kda", "ssd", "selective_scan", "affine_scan", "matrix", "causal_conv1d")
#: The results of a call: outputs and the final state, then gradients by the name of the input.
Results = dict[str, Tensor]


@dataclass
class RecurrentCase:
    """A call: tensors of the whole sequence by name, and how to cut it."""

    kind: str
    tensors: dict[str, Tensor]
    layout: Layout
    documents: Documents | None
    padding: Tensor | None
    initial_state: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)
    #: Whether forward and backward run under autocast to bf16.
    autocast: bool = False
    #: Whether the loss is a penalty on the gradients of the sharded inputs, whose own gradients are results, too.
    twice: bool = False

    @property
    def dim(self) -> int:
        """The dim of tokens."""
        return 2 if self.kind == "causal_conv1d" else 1

    @property
    def sharded(self) -> tuple[str, ...]:
        """The tensors that have tokens."""
        return tuple(name for name in self.tensors if name not in ("A", "weight", "bias", "S"))

    def call(self, tensors: dict[str, Tensor], padding: Tensor | None, **where: Any) -> tuple[Tensor, Tensor]:
        """(outputs, final state) of the layer."""
        name = {"kda": "gated_delta_rule", "matrix": "affine_scan"}.get(self.kind, self.kind)
        order = [tensors[x] for x in ("q", "k", "v", "g", "beta", "x", "dt", "A", "B", "C", "a", "b", "weight", "bias")
                 if x in tensors]  # fmt: skip
        layout = where.pop("layout", self.layout)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return getattr(ra, name)(
                *order, layout=layout, documents=self.documents, padding=padding, initial_state=tensors.get("S"),
                output_final_state=True, **self.options, **where,
            )  # fmt: skip

    def cotangents(self, out: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What gradients begin with."""
        made = torch.Generator().manual_seed(7)
        return tuple(torch.randn(x.shape, generator=made).to(x.dtype) for x in (out, state))


def draw(seed: int, kind: str, *, ranks: int | None = None, plain: bool = False) -> RecurrentCase:
    """A random call."""
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    ranks = ranks or int(rng.integers(1, 6))
    tokens = int(rng.choice([rng.integers(0, 12), rng.integers(12, 90), rng.integers(90, 260)], p=[0.2, 0.6, 0.2]))
    batch = int(rng.integers(1, 4))
    lengths = [_partition(rng, tokens) for _ in range(batch)]
    documents = [None, Documents(lengths[0]), Documents(lengths)][0 if plain else int(rng.integers(3))]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=torch_rng, dtype=torch.float64) * scale

    keys, values, heads, width = (int(rng.integers(1, 5)) for _ in range(4))
    options: dict[str, Any] = {}
    if kind in ("gated_delta_rule", "kda"):
        own = heads * int(rng.integers(1, 3))
        g = (batch, tokens, own, keys) if kind == "kda" else (batch, tokens, own)
        tensors = {
            "q": normal(batch, tokens, heads, keys),
            "k": F.normalize(normal(batch, tokens, heads, keys), dim=-1),
            "v": normal(batch, tokens, own, values),
            "g": -normal(*g).abs() * float(rng.choice([0.05, 1.0, 20.0])),
            "beta": normal(batch, tokens, own).sigmoid(),
        }
        state = (own, keys, values)
    elif kind == "ssd":
        groups = [g for g in (1, 2, 3, 4) if heads % g == 0]
        group = int(rng.choice(groups))
        tensors = {
            "x": normal(batch, tokens, heads, values),
            "dt": F.softplus(normal(batch, tokens, heads)) * float(rng.choice([0.1, 1.0, 30.0])),
            "A": -normal(heads).exp(),
            "B": normal(batch, tokens, group, keys),
            "C": normal(batch, tokens, group, keys),
        }
        state = (heads, values, keys)
    elif kind == "selective_scan":
        tensors = {
            "x": normal(batch, tokens, heads),
            "dt": F.softplus(normal(batch, tokens, heads)),
            "A": -normal(heads, keys).exp(),
            "B": normal(batch, tokens, keys),
            "C": normal(batch, tokens, keys),
        }
        state = (heads, keys)
    elif kind == "causal_conv1d":
        tensors = {"x": normal(batch, heads, tokens), "weight": normal(heads, width)}
        if rng.random() < 0.5:
            tensors["bias"] = normal(heads)
        options["activation"] = [None, "silu"][int(rng.integers(2))]
        state = (heads, width - 1)
    elif kind == "matrix":
        tensors = {
            "a": normal(batch, tokens, heads, keys, keys, scale=0.5),
            "b": normal(batch, tokens, heads, keys, values),
        }
        options["matrix"], state = True, (heads, keys, values)
    else:
        tensors = {"a": normal(batch, tokens, heads, scale=0.9), "b": normal(batch, tokens, heads)}
        if rng.random() < 0.3:
            tensors["a"] = tensors["a"] * (torch.rand(tensors["a"].shape, generator=torch_rng) < 0.8)
        state = (heads,)
    if rng.random() < 0.5:
        tensors["S"] = normal(batch, *state)
    padding = None
    if rng.random() < 0.4:
        padding = torch.rand(batch, tokens, generator=torch_rng) < 0.3
        cut = int(rng.integers(0, tokens + 1))
        padding = [
            padding,
            torch.arange(tokens).expand(batch, -1) < cut,
            torch.arange(tokens).expand(batch, -1) >= cut,
        ][int(rng.integers(3))]
    return RecurrentCase(kind, tensors, _draw_layout(rng, tokens, ranks), documents, padding, tensors.get("S"), options)


def _partition(rng: np.random.Generator, tokens: int) -> list[int]:
    """Lengths, some of them 0 or 1, that sum to `tokens`."""
    cuts = sorted(int(x) for x in rng.integers(0, tokens + 1, int(rng.integers(0, 6))))
    return [int(x) for x in np.diff([0, *cuts, tokens])]


def _draw_layout(rng: np.random.Generator, tokens: int, ranks: int) -> Layout:
    rows = [int(x) for x in np.diff([0, *sorted(rng.integers(0, tokens + 1, ranks - 1)), tokens])]
    chunk = max(1, -(-tokens // (ranks * int(rng.integers(1, 9)))))
    names = ["contiguous", "zigzag", f"striped({chunk})", f"balanced({chunk})", f"rows({', '.join(map(str, rows))})"]
    layout = make_layout(str(rng.choice(names)), tokens=tokens, ranks=ranks, pattern=ra.Causal())
    try:
        list_runs(layout)
    except ra.Unsupported:  # many short stripes lie in another order in the shard
        return make_layout("zigzag", tokens=tokens, ranks=ranks)
    return layout


def draw_hard(seed: int, kind: str, **options: Any) -> RecurrentCase:
    """A random call in fp32, often under autocast, twice differentiated, or with decays from far below 0 to -inf."""
    case, rng = draw(seed, kind, **options), np.random.default_rng(seed + 1_000_000)
    case.autocast, case.twice = rng.random() < 0.5, rng.random() < 0.5
    if case.layout.tokens and "weight" not in case.tensors and rng.random() < 0.7:
        x, tokens = case.tensors, case.layout.tokens
        edges = [0, tokens - 1, *(p for run in list_runs(case.layout) for p in (run.start - 1, run.start, run.stop))]
        hit = torch.zeros(tokens, dtype=torch.bool)
        hit[[int(p) for p in (*edges, *rng.integers(0, tokens, 4)) if 0 <= p < tokens and rng.random() < 0.6]] = True
        hit |= rng.random() < 0.2
        log = float(rng.choice([-30.0, -1e3, -1e5, -1e7, -math.inf]))
        if "g" in x:
            x["g"] *= 0.05
            x["g"][hit.view(-1, *[1] * (x["g"].ndim - 2)) & torch.from_numpy(rng.random(x["g"].shape) < 0.7)] = log
        elif "dt" in x:
            log = max(log, -1e7)
            x["A"] = -1.0 - torch.from_numpy(rng.random(x["A"].shape))
            x["dt"] *= 0.05
            x["dt"][:, hit] = -log
            x["x"][:, hit] /= -log
        else:
            x["a"][:, hit] *= math.exp(log)
    case.tensors = {name: x.float() for name, x in case.tensors.items()}
    return case


def oracle(case: RecurrentCase) -> Results:
    """The results in fp64, token by token and document by document."""
    case = replace(case, autocast=False)
    leaves = {name: x.double().requires_grad_() for name, x in case.tensors.items()}
    outs, states = [], []
    batch, tokens = next(iter(case.tensors.values())).shape[0], case.layout.tokens
    for row in range(batch):
        lengths = (tokens,) if case.documents is None else case.documents.row(row).lengths
        parts, first, state = [], 0, None
        for length in lengths:
            rows = slice(first, first + length)
            first += length
            if first > length and not length:
                continue
            given = leaves["S"][row] if "S" in leaves and first == length else None
            hidden = None if case.padding is None else case.padding[row, rows]
            mine = {name: x[row].narrow(case.dim - 1, rows.start, length) if name in case.sharded else x
                    for name, x in leaves.items()}  # fmt: skip
            out, state = _one_document(case, mine, given, hidden, length)
            parts.append(out)
        outs.append(torch.cat(parts, case.dim - 1))
        states.append(state)
    out, state = torch.stack(outs), torch.stack(states)
    return _differentiate(case, leaves, out, state)


def _differentiate(
    case: RecurrentCase, leaves: dict[str, Tensor], out: Tensor, state: Tensor, cotangents: tuple[Tensor, ...] = ()
) -> Results:
    """The results with the gradients of all inputs."""
    results = {"out": out.detach(), "state": state.detach()}
    pairs = zip((out, state), cotangents or case.cotangents(out, state), strict=True)
    # A square has a second derivative even where the layer is linear.
    losses = [((x.square() if case.twice else x) * c).sum() for x, c in pairs if x.requires_grad]
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        first = _grad(losses, leaves, create_graph=case.twice)
        results |= {f"d{name}": grad.detach() for name, grad in first.items()}
        if case.twice:
            penalties = [first[name].square().sum() for name in case.sharded if first[name].requires_grad]
            results |= {f"dd{name}": grad for name, grad in _grad(penalties, leaves).items()}
    return results


def _grad(losses: list[Tensor], leaves: dict[str, Tensor], **options: Any) -> Results:
    """The gradients of the sum of losses, by the name of the leaf."""
    if not losses:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(losses, list(leaves.values()), materialize_grads=True, **options)
    return dict(zip(leaves, grads, strict=True))


def _one_document(
    case: RecurrentCase, x: dict[str, Tensor], given: Tensor | None, hidden: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    kind = case.kind
    seen = torch.ones(length) if hidden is None else (~hidden).double()
    if kind == "causal_conv1d":
        channels, width = x["weight"].shape
        before = x["x"].new_zeros(channels, width - 1) if given is None else given
        line = torch.cat([before, x["x"] * seen], 1)
        out = [(line[:, t : t + width] * x["weight"]).sum(1) + x.get("bias", 0.0) for t in range(length)]
        whole = torch.stack(out, 1) if out else x["x"]
        return (F.silu(whole) if case.options["activation"] else whole), line[:, length : length + width - 1]
    outs = []
    if kind in ("gated_delta_rule", "kda"):
        heads, keys, values = x["v"].shape[1], x["q"].shape[2], x["v"].shape[2]
        q, k = (x[name].repeat_interleave(heads // x["q"].shape[1], 1) for name in "qk")
        state = x["v"].new_zeros(heads, keys, values) if given is None else given
        for t in range(length):
            decay = x["g"][t].masked_fill(seen[t] == 0, 0.0).exp()
            state = state * (decay[:, :, None] if kind == "kda" else decay[:, None, None])
            error = x["v"][t] - torch.einsum("hk,hkv->hv", k[t], state)
            state = state + torch.einsum("hk,hv->hkv", k[t], error * x["beta"][t][:, None] * seen[t])
            shown = q[t] * (seen[t] if hidden is not None else 1.0)
            outs.append(torch.einsum("hk,hkv->hv", shown, state) * keys**-0.5)
        out = torch.stack(outs) if outs else x["v"]
    elif kind == "ssd":
        heads, values = x["x"].shape[1:]
        b, c = (x[name].repeat_interleave(heads // x["B"].shape[1], 1) for name in "BC")
        state = x["x"].new_zeros(heads, values, b.shape[2]) if given is None else given
        for t in range(length):
            dt = x["dt"][t] * seen[t]
            state = state * (dt * x["A"]).exp()[:, None, None] + torch.einsum(
                "hp,hn->hpn", x["x"][t] * dt[:, None], b[t]
            )
            outs.append(torch.einsum("hpn,hn->hp", state, c[t]) * seen[t])
        out = torch.stack(outs) if outs else x["x"]
    elif kind == "selective_scan":
        state = x["A"].new_zeros(x["A"].shape) if given is None else given
        for t in range(length):
            dt = x["dt"][t] * seen[t]
            state = state * (dt[:, None] * x["A"]).exp() + (x["x"][t] * dt)[:, None] * x["B"][t]
            outs.append((state * x["C"][t]).sum(1) * seen[t])
        out = torch.stack(outs) if outs else x["x"]
    else:
        state = x["b"].new_zeros(x["b"].shape[1:]) if given is None else given
        for t in range(length):
            if seen[t]:
                state = (x["a"][t] @ state if kind == "matrix" else x["a"][t] * state) + x["b"][t]
            outs.append(state)
        out = torch.stack(outs) if outs else x["b"]
    return out, state + 0.0


def run_virtual(case: RecurrentCase, ranks: int | None = None, **where: Any) -> Results:
    """The results on virtual ranks."""
    leaves = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}
    if ranks == 1:
        where["layout"] = make_layout("contiguous", tokens=case.layout.tokens, ranks=1)
    out, state = case.call(leaves, case.padding, ranks=ranks or case.layout.ranks, **where)
    return _differentiate(case, leaves, out, state)


def run_rank(case: RecurrentCase, rank: int, whole: Results | None = None, **where: Any) -> tuple[Results, Results]:
    """(this rank's results, the same part of `whole`, the results on virtual ranks by default).

    Gradients of parameters are left out: each rank has a part of them.
    """
    layout, leaves = case.layout, {}
    cut = {"S", "A", "weight", "bias"}
    for name, x in case.tensors.items():
        leaves[name] = (x if name in cut else layout.shard_tensor(x, rank, case.dim)).clone().requires_grad_()
    padding = None if case.padding is None else layout.shard_tensor(case.padding, rank, 1)
    out, state = case.call(leaves, padding, **where)
    grad, grad_state = case.cotangents(
        out.new_empty(*out.shape[: case.dim], layout.tokens, *out.shape[case.dim + 1 :]), state
    )
    mine = _differentiate(
        case, leaves, out, state,
        (layout.shard_tensor(grad, rank, case.dim), grad_state if rank == 0 else grad_state * 0),
    )  # fmt: skip
    mine = {name: x for name, x in mine.items() if name in ("out", "state") or name.lstrip("d") not in cut}
    whole = of_first(lambda: run_virtual(case)) if whole is None else whole
    return mine, {
        name: whole[name] if name == "state" else layout.shard_tensor(whole[name], rank, case.dim) for name in mine
    }


def planned(case: RecurrentCase, rank: int) -> tuple[int, int]:
    """(messages, bytes) that a rank sends in a forward and a backward."""
    layout, documents, batch = case.layout, case.documents, next(iter(case.tensors.values())).shape[0]
    if case.kind == "causal_conv1d":
        channels, width = case.tensors["weight"].shape
        unit = batch * channels * 8
        plans = [plan_rows(layout, documents, width - 1, unit), plan_rows(layout, None, width - 1, unit, ends=True)]
    else:
        state, decay = _shapes(case)
        unit = batch * (math.prod(state) + math.prod(decay)) * 8
        plans = [
            plan_states(layout, documents, unit, ra.get_machine("cpu")),
            plan_rows(layout, None, 1, batch * math.prod(state) * 8, ends=True),
        ]
    sent = [count for plan in plans for (_, *ends), count in plan.messages.items() for end in ends if end == rank]
    return len(sent), sum(sent)


def _shapes(case: RecurrentCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a state and of A."""
    x = case.tensors
    if case.kind in ("gated_delta_rule", "kda"):
        heads, keys, values = x["v"].shape[2], x["q"].shape[3], x["v"].shape[3]
        return (heads, keys, values), (heads, keys, keys)
    if case.kind == "ssd":
        return (*x["x"].shape[2:], x["B"].shape[3]), (x["x"].shape[2],)
    if case.kind == "selective_scan":
        return tuple(x["A"].shape), tuple(x["A"].shape)
    return tuple(x["b"].shape[2:]), tuple(x["a"].shape[2:])


def equals_virtual(rank: int, cases: int) -> int:
    """Cases whose results on this rank are those of virtual ranks bit for bit, with the planned messages and bytes."""
    size, ring = torch.distributed.get_world_size(), get_transport()
    for seed in range(cases):
        case = draw(seed, KINDS[seed % len(KINDS)], ranks=size)
        ring.counters.reset()
        mine, theirs = run_rank(case, rank)
        assert (ring.counters.sent_messages, ring.counters.sent_bytes) == planned(case, rank), seed
        for name, x in mine.items():
            assert torch.equal(x, theirs[name]), (seed, case.kind, case.layout.name, name)
    return cases


def hard_calls(rank: int, first: int, count: int) -> float:
    """The largest error on this rank, over random hard calls, against single steps in fp64."""
    worst = 0.0
    for seed in range(first, first + count):
        case = draw_hard(seed, KINDS[seed % len(KINDS)], ranks=torch.distributed.get_world_size())
        mine, expected = run_rank(case, rank, of_first(lambda case=case: oracle(case)))
        assert all(x.dtype == torch.float32 for x in mine.values())
        worst = max(worst, error(mine, expected))
    return worst


def of_one_input(rank: int) -> list[str]:
    """What raises if only the decays have a gradient, and where rank 1 differentiates once more than rank 0."""
    v, layout = torch.ones(1, 6, 1, 2), "contiguous"
    g = torch.full((1, 6, 1), -0.1, requires_grad=True)

    def gradient(twice: bool) -> None:
        out, _ = ra.gated_delta_rule(v, v, v, g, v[..., 0], layout=layout)
        (grad,) = torch.autograd.grad(out.square().sum(), g, create_graph=True)
        torch.autograd.grad((grad if twice else out).square().sum(), g)

    return [told_by(lambda twice=twice: gradient(twice)) for twice in (False, rank == 1, True)]


def refusals(rank: int) -> list[str]:
    """What calls raise on this rank that are wrong on all ranks, or differ on rank 1."""
    x = torch.randn(1, 2, 24)
    v = torch.randn(1, 24, 2, 4)
    gdn = (v, v, v, -v[..., 0].abs(), v[..., 0].sigmoid())
    one = rank == 1

    def conv(x: Tensor = x, layout: Any = "zigzag", width: int = 4, **options: Any) -> Any:
        return ra.causal_conv1d(x, torch.ones(x.shape[1], width), layout=layout, **options)

    calls: list[Callable[[], Any]] = [
        lambda: conv(layout="striped(1)"),
        lambda: conv(layout="zigzag" if one else "contiguous"),
        lambda: conv(width=3 if one else 4),
        lambda: conv(x[:, :, :23] if one else x),
        lambda: conv(x[0] if one else x),
        lambda: conv(documents=ra.Documents([40, 8] if one else [8, 40])),
        lambda: conv(documents=ra.Documents([4, 8])),
        lambda: conv(documents=[24, 24] if one else None),
        lambda: conv(width=0),
        lambda: conv(initial_state=x[..., :4]),
        lambda: conv(activation="relu" if one else None),
        lambda: conv(x.requires_grad_(False) if one else x.clone().requires_grad_()),
        lambda: conv(x.double() if one else x),
        lambda: conv() if one else ra.gated_delta_rule(*gdn, layout="zigzag"),
        lambda: ra.gated_delta_rule(*gdn, layout="zigzag", scale=2.0 if one else None),
        lambda: ra.gated_delta_rule(*gdn, layout="zigzag", initial_state=v if one else None),
        lambda: conv(reproducible=16 if one else None),
        *(
            lambda layer=layer: layer(x, layout="zigzag", reproducible=16)
            for layer in (ra.affine_scan, ra.causal_conv1d, ra.gated_delta_rule, ra.selective_scan, ra.ssd)
        ),
        lambda: ra.gated_delta_rule(*gdn, layout="zigzag"),
    ]
    return [told_by(call) for call in calls]


def error(results: Results, expected: Results) -> float:
    """The largest error of a tensor, relative to its largest number (or 1)."""
    assert results.keys() == expected.keys(), (results.keys(), expected.keys())
    worst = 0.0
    for name, x in results.items():
        assert x.shape == expected[name].shape, (name, x.shape, expected[name].shape)
        if x.numel():
            apart = float(
                (x.double() - expected[name].double()).abs().max() / max(1.0, float(expected[name].abs().max()))
            )
            worst = max(worst, apart if apart == apart else float("inf"))
    return worst
