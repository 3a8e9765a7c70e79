"""Recurrent layers and causal convolutions over sharded sequences, exact and differentiable.

Every function takes the rows of this rank, or with `ranks=` those of all virtual ranks, and returns the same rows of
the result. Each rank computes the affine map of its runs without the state before them, one exchange composes the maps
(`runs`), and a second pass computes the outputs with the true states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..call.arguments import computing
from ..call.functional import one_thread
from ..dtypes import check_type
from ..errors import InvalidInput, Unsupported
from ..kernels.base import wide
from ..layout.regular import Layout
from ..machine.presets import get_machine
from ..pattern.documents import Documents
from ..text import shown
from . import functions
from .exchange import Close, Open, Ranks, Where
from .runs import Piece, RunPlan, cut_ends, cut_pieces, list_runs, plan_rows, plan_states

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: A rank's flat inputs, each [1, rows, ...].
Rows = tuple[Tensor, ...]
Shape = tuple[int, ...]
#: Computes pieces: (flat inputs, cu_seqlens, initial states or None, whether to return final states).
Compute = Callable[..., tuple[Tensor, Tensor | None]]
P = ParamSpec("P")
T = TypeVar("T")


def _collective(layer: Callable[P, T]) -> Callable[P, T]:
    """The layer as one call of all ranks, which are told what it raises, without autocast.

    torch.compile calls it as it is: its exchanges follow each other on the host.
    """

    @wraps(layer)
    def call(*args: Any, **options: Any) -> T:
        where = {name: options.pop(name) for name in Where.__annotations__.keys() & options}
        options["ranks"] = ranks = Ranks(layer.__name__, **where)
        if options.pop("reproducible", None) is not None:
            with ranks.report or nullcontext():
                raise Unsupported(
                    f"{layer.__name__} has no reproducible=: maps of runs are composed in an order that follows the "
                    "number of ranks, and so do their bits; leave it out"
                )
        device = next((x.device for x in (*args, *options.values()) if isinstance(x, Tensor)), torch.device("cpu"))
        if ranks.report is None:
            with computing(device):
                return layer(*args, **options)
        with computing(device), one_thread(ranks.report), ranks.report:
            return layer(*args, **options)

    return cast("Callable[P, T]", torch.compiler.disable(call))


def _joined(*, group: Any = None, mesh: Any = None, transport: Any = None, ranks: Any = None) -> Ranks:
    """The ranks that `_collective` gives to a layer in place of its arguments `where`."""
    return cast("Ranks", ranks)


def _cu_seqlens(pieces: Sequence[Piece]) -> list[int]:
    return [0, *accumulate(piece.end - piece.begin for piece in pieces)]


class _Scan:
    """One call of a recurrence: tensors [B, n, ...] by name, and the states between runs.

    state, decay, out: the shapes of a state, of A, and of a row of the output.
    compute(*rows, cu_seqlens, initial_state, output_final_state) -> (out [1, rows, *out], states [pieces, *state]).
    maps(*rows, cu_seqlens, initial_state, spans) -> (A [pieces, *decay], B [pieces, *state]); A is used where spans[i].
    The parameters of `run` follow the rows.
    matrix: A multiplies as a matrix; else elementwise, with broadcasting.
    """

    def __init__(
        self, ranks: Ranks, tensors: Mapping[str, Tensor], documents: Documents | None, initial_state: Tensor | None,
        state: Shape, decay: Shape, out: Shape, compute: Compute, maps: Callable[..., tuple[Tensor, Tensor]],
        *, matrix: bool = False,
    ) -> None:  # fmt: skip
        first = next(iter(tensors.values()))
        self.ranks, self.tensors, self.batch, self.documents = ranks, tensors, first.shape[0], documents
        self.state, self.decay, self.out, self.compute, self.maps = state, decay, out, compute, maps
        #: Applies a map to a state or to another map.
        self.apply = functions.matmul if matrix else torch.mul
        self.zero = torch.zeros(state, dtype=wide(first.dtype), device=first.device)
        self.initial = None if initial_state is None else initial_state.to(self.zero.dtype)
        self.sizes = [self.batch * math.prod(shape) for shape in (decay, state)]
        self.pieces = {rank: cut_pieces(ranks.layout, documents, rank, self.batch) for rank in ranks.local}

    def run(self, final: bool, *parameters: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output [B, n, *out], state after the sequence [B, *state] or None); every rank gets the whole state."""
        ranks, count = self.ranks, len(self.tensors)
        token, self.initial, *opened = Open.apply(ranks, self.initial, *self.tensors.values(), *parameters)
        first, parameters = opened[0], tuple(opened[count:])
        shards = zip(*(ranks.shard(x, 1) for x in opened[:count]), strict=True)
        rows = {r: tuple(x.reshape(1, -1, *x.shape[2:]) for x in xs) for r, xs in zip(ranks.local, shards, strict=True)}
        before, token = self.exchange(rows, parameters, token)
        outs, units, last = [], dict[int, Tensor](), len(list_runs(ranks.layout)) - 1
        for rank, pieces in self.pieces.items():
            if not pieces:
                outs.append(first.new_zeros(self.batch, 0, *self.out))
                continue
            ends = {piece.row: place for place, piece in enumerate(pieces) if final and piece.run == last}
            out, states = self.compute(
                *rows[rank], *parameters, cu_seqlens=_cu_seqlens(pieces), initial_state=self.states(pieces, before),
                output_final_state=bool(ends),
            )  # fmt: skip
            outs.append(out.view(self.batch, -1, *self.out))
            if ends:
                assert states is not None
                units[last] = states[[*ends.values()]].to(self.zero.dtype).reshape(1, -1)
        results = [ranks.unshard(outs, 1)]
        if final:
            plan = plan_rows(ranks.layout, None, 1, self.sizes[1] * self.zero.element_size(), ends=True)
            state = (self.zero.expand(self.batch, *self.state) if self.initial is None else self.initial).clone()
            if plan.rounds:
                got, token = ranks.move(plan, 0, units, self.zero.new_empty(0, self.sizes[1]), token)
                state = got[ranks.local[0], last].view(state.shape)
            results.append(state)
        _, out, *ended = Close.apply(ranks, token, *results)
        return out, ended[0] if ended else None

    def states(self, pieces: Sequence[Piece], before: Mapping[int, Tensor]) -> Tensor | None:
        """The states with which the pieces begin, [pieces, *state]; None if all are 0.

        `before` holds the received states, by run.
        """
        known = [
            (self.initial[p.row] if self.initial is not None and not p.start else self.zero)
            if not p.before
            else before[p.run][p.row] if before else self.zero
            for p in pieces
        ]  # fmt: skip
        return None if all(x is self.zero for x in known) else torch.stack(known)

    def exchange(self, rows: Mapping[int, Rows], parameters: Rows, token: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """(states, next autograd token): the state [B, *state] before each local run that needs one, by run."""
        ranks, unit = self.ranks, sum(self.sizes) * self.zero.element_size()
        machine = get_machine("cuda" if self.zero.is_cuda else "cpu")
        plan = plan_states(ranks.layout, self.documents, unit, machine)
        units, like = self.summarize(plan, rows, parameters), self.zero.new_empty(0, sum(self.sizes))
        maps, states = dict[int, Tensor](), dict[int, Tensor]()
        for number, hops in enumerate(plan.rounds):
            sent = {hop.source: units[hop.source] for hop in hops if plan.rank_of(hop.source) in ranks.local}
            got, token = ranks.move(plan, number, sent, like, token)
            later = dict(maps)
            for source, run, _ in hops:
                if (rank := plan.rank_of(run)) not in ranks.local:
                    continue
                a, b = self.unpack(got[rank, source])
                if plan.way == "gather":
                    states[run] = self.apply(a, states[run]) + b if run in states else b
                elif run in maps:  # the map of more runs before those of `maps`
                    a2, b2 = self.unpack(maps[run])
                    states[run] = self.apply(a2, b) + b2
                    later[run] = self.pack(self.apply(a2, a), states[run])
                else:
                    later[run], states[run] = got[rank, source], b
            units = maps = later
        return states, token

    def summarize(self, plan: RunPlan, rows: Mapping[int, Rows], parameters: Rows) -> dict[int, Tensor]:
        """For each local run that other runs need, the affine map from the state before it to that after it, packed.

        The map is 0 for batch rows in which a document ends with the run.
        """
        sources, units = {hop.source for hops in plan.rounds[:1] for hop in hops}, dict[int, Tensor]()
        for rank, pieces in self.pieces.items():
            tails = [piece for piece in pieces if piece.goes_on and piece.run in sources]
            if not tails:
                continue
            # A map spans its run if its document does; else the state before the run does not matter.
            spans = [piece.before > 0 and piece.start == plan.runs[piece.run].start for piece in tails]
            a, b = self.maps(
                *(torch.cat([x[:, piece.begin : piece.end] for piece in tails], 1) for x in rows[rank]), *parameters,
                cu_seqlens=_cu_seqlens(tails), initial_state=self.states(tails, {}), spans=spans,
            )  # fmt: skip
            a, b = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (a, b))
            places = {(piece.run, piece.row): place for place, piece in enumerate(tails)}
            for run in {piece.run for piece in tails}:
                at = [places.get((run, row), len(tails)) for row in range(self.batch)]
                spanning = [place if [*spans, False][place] else len(tails) for place in at]
                units[run] = self.pack(a[spanning], b[at])
        empty = self.zero.new_zeros(1, sum(self.sizes))
        return {run: empty for run in sources if plan.rank_of(run) in self.ranks.local} | units

    def pack(self, a: Tensor, b: Tensor) -> Tensor:
        """Join the affine maps (A, B) of all batch rows into one row [1, width]."""
        return torch.cat([a.reshape(1, -1), b.reshape(1, -1)], 1)

    def unpack(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `pack`: the maps (A, B) of all batch rows."""
        a, b = unit.split(self.sizes, 1)
        return a.view(self.batch, *self.decay), b.view(self.batch, *self.state)


@_collective
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, layout: str | Layout,
    documents: Documents | None = None, padding: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, scale: float | None = None, function: Compute | None = None,
    **where: Unpack[Where],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule (arXiv:2412.06464), or KDA (arXiv:2510.26692), over a sharded sequence. Collective.

    Per token S = (I - beta k k^T) Diag(exp(g)) S + beta k v^T and o = scale * S^T q, with S [K, V] for each head.

    q, k [B, n, H, K], v [B, n, HV, V], beta [B, n, HV]: the rows of this rank; HV is a multiple of H.

    g: the logarithm of the decay, [B, n, HV], or for each key channel (KDA) [B, n, HV, K].
    layout: the Layout that cut the sequence, or its name; a rank may have at most 16 runs of consecutive tokens.
    documents: packed documents; the state is 0 at the start of each.
    padding: bool [B, n]; True marks tokens that leave the state as it is.
    initial_state: [B, HV, K, V] before the first token, equal on all ranks; only the rank of the first token gets its
        gradient. It belongs to the first document.
    scale: default 1 / sqrt(K).
    function: computes this rank's tokens, one sequence for each run and document; takes the arguments of
        flash-linear-attention's chunk_gated_delta_rule (or chunk_kda), with cu_seqlens. None: those functions if
        flash-linear-attention is installed and tensors are on a GPU, else plain torch.
    where: at most one of group, mesh, transport, as in `ring_attention`, and ranks, a number of virtual ranks in this
        process: tensors then hold the rows of all ranks in natural order.

    Returns (o [B, n, HV, V] in the dtype of v, state after the last token [B, HV, K, V] on every rank, or None). States
    are fp32, or fp64 for fp64 inputs. Raises InvalidInput, Unsupported or Mismatch on every rank before the first
    message. Any other exception on one rank, in the backward too, raises Mismatch on the other ranks; after the first
    message the group can then make no more calls.
    """
    ranks, tensors = _joined(**where), {"v": v, "q": q, "k": k, "g": g, "beta": beta}
    decays = "B n HV K" if getattr(g, "ndim", 3) == 4 else "B n HV"
    dims = {"v": "B n HV V", "q": "B n H K", "k": "B n H K", "g": decays, "beta": "B n HV"}
    size = ranks.agree(
        layout, documents,
        {**{name: (x, dims[name]) for name, x in tensors.items()}, **_rest(initial_state, "HV K V", padding)},
        scale=scale, function=_name(function), output_final_state=output_final_state,
    )  # fmt: skip
    heads, keys, values = size["HV"], size["K"], size["V"]
    if heads % size["H"]:
        raise InvalidInput(f"v has {heads} heads and q {size['H']}; the first must be a multiple of the second")
    tensors = _blank(tensors, padding)
    compute = function or functions.find("gated_delta_rule" if g.ndim == 3 else "kda", v)

    def run(v: Tensor, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], device=v.device)
        return compute(q, k, v, g, beta, scale=keys**-0.5 if scale is None else scale, **options)

    def maps(
        v: Tensor, *others: Tensor, initial_state: Tensor | None, spans: list[bool], **options: Any
    ) -> tuple[Tensor, Tensor]:
        if any(spans):
            # With v = 0 and the state I, the final state is A: more columns of v and of the state.
            one = torch.eye(keys, dtype=wide(v.dtype), device=v.device).expand(len(spans), heads, keys, keys)
            before = one.new_zeros(len(spans), heads, keys, values) if initial_state is None else initial_state
            v, initial_state = torch.cat([v, v.new_zeros(*v.shape[:3], keys)], 3), torch.cat([before, one], 3)
        if compute is functions.gated_delta_rule:
            options["outputs"] = False
        state = run(v, *others, initial_state=initial_state, output_final_state=True, **options)[1]
        assert state is not None
        a = state[..., values:] if any(spans) else state.new_zeros(len(spans), heads, keys, keys)
        return a, state[..., :values]

    state, decay, out = (heads, keys, values), (heads, keys, keys), (heads, values)
    scan = _Scan(ranks, tensors, documents, initial_state, state, decay, out, run, maps, matrix=True)
    return scan.run(output_final_state)


@_collective
def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, layout: str | Layout,
    documents: Documents | None = None, padding: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, function: Compute | None = None, **where: Unpack[Where],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Mamba-2's state-space duality (arXiv:2405.21060) over a sharded sequence. Collective.

    Per token S = exp(dt A) S + dt x B^T and y = S C, with S [P, N] for each head.

    x [B, n, H, P], dt [B, n, H] (positive: after softplus and bias), B and C [B, n, G, N]: the rows of this rank; G
    divides H. A [H], negative. initial_state: [B, H, P, N]. The caller adds the skip D x and applies the gate.

    function: computes this rank's tokens; takes the arguments of `recurrence.functions.ssd`. None: mamba_ssm's function
        if that is installed and tensors are on a GPU, else plain torch.

    The other arguments, the errors and results are those of `gated_delta_rule`: (y [B, n, H, P], state [B, H, P, N]).
    """
    dims = {"x": "B n H P", "dt": "B n H", "B": "B n G N", "C": "B n G N"}
    compute = functions.find("ssd", x) if function is None else function
    return _mamba(
        _joined(**where), (x, dt, B, C), A, dims, ("H", "H P N", ("H", "", ""), "H P"), compute,
        lambda dt, A: (dt * A)[..., None, None], layout, documents, padding, initial_state, output_final_state,
        function,
    )  # fmt: skip


@_collective
def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, layout: str | Layout,
    documents: Documents | None = None, padding: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, function: Compute | None = None, **where: Unpack[Where],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Mamba's selective scan (arXiv:2312.00752) over a sharded sequence. Collective.

    Per token S = exp(dt A) S + dt x B and y = sum_N S C, with S [D, N].

    x, dt [B, n, D] (dt after softplus and bias), B and C [B, n, N]: the rows of this rank. A [D, N], negative.
    initial_state: [B, D, N].

    function: computes this rank's tokens; takes the arguments of `recurrence.functions.selective_scan`. None: plain
        torch.

    The other arguments, the errors and results are those of `gated_delta_rule`: (y [B, n, D], state [B, D, N]).
    """
    dims = {"x": "B n D", "dt": "B n D", "B": "B n N", "C": "B n N"}
    compute = functions.selective_scan if function is None else function
    return _mamba(
        _joined(**where), (x, dt, B, C), A, dims, ("D N", "D N", ("D", "N"), "D"), compute,
        lambda dt, A: dt[..., None] * A, layout, documents, padding, initial_state, output_final_state, function,
    )  # fmt: skip


def _mamba(
    ranks: Ranks, given: Rows, A: Tensor, dims: dict[str, str], shapes: tuple[str, str, Sequence[str], str],
    compute: Compute, decays: Callable[[Tensor, Tensor], Tensor], layout: str | Layout, documents: Documents | None,
    padding: Tensor | None, initial_state: Tensor | None, final: bool, function: Compute | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A recurrence with A(run) = exp of the sum of decays(dt, A), [1, rows, *decay]; `shapes`: A, state, decay, out."""
    tensors = dict(zip(dims, given, strict=True))
    size = {"": 1} | ranks.agree(
        layout, documents,
        {**{name: (x, dims[name]) for name, x in tensors.items()}, "A": (A, shapes[0]),
         **_rest(initial_state, shapes[1], padding)},
        function=_name(function), output_final_state=final,
    )  # fmt: skip
    if size.get("H", 1) % size.get("G", 1):
        raise InvalidInput(f"x has {size['H']} heads and B {size['G']} groups; groups must divide heads")
    tensors = _blank(tensors, padding)

    def run(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return compute(x, dt, A, B, C, **options)

    def maps(
        x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, *, cu_seqlens: list[int], spans: list[bool],
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options: Any = {"outputs": False} if compute is functions.ssd else {}
        options |= {"cu_seqlens": cu_seqlens, "initial_state": initial_state, "output_final_state": True}
        final = run(x, dt, B, C, A, **options)[1]
        assert final is not None
        lengths = [b - a for a, b in pairwise(cu_seqlens)]
        sums = [part.sum(0) for part in decays(dt.to(final.dtype), A)[0].split(lengths)]
        return torch.stack(sums).exp(), final

    state, decay, out = (
        tuple(size[name] for name in names) for names in (shapes[1].split(), shapes[2], shapes[3].split())
    )
    return _Scan(ranks, tensors, documents, initial_state, state, decay, out, run, maps).run(final, A)


@_collective
def affine_scan(
    a: Tensor, b: Tensor, *, layout: str | Layout, matrix: bool = False, documents: Documents | None = None,
    padding: Tensor | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    **where: Unpack[Where],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """All states of S = a S + b over a sharded sequence, for layers such as RG-LRU (arXiv:2402.19427). Collective.

    b is [B, n, ...], the rows of this rank. a has as many dims as b and broadcasts to it; with `matrix`, a is [B, n,
    ..., K, K] and b [B, n, ..., K, V]. initial_state: [B, ...]. a may be 0 or negative.

    The other arguments and the errors are those of `gated_delta_rule`. Returns (states [B, n, ...], the last state
    [B, ...] or None).
    """
    check_type("matrix", matrix, "bool")
    inner = [f"d{dim}" for dim in range(getattr(b, "ndim", 2) - 2)]
    fits = [*inner[:-1], *inner[-2:-1]] if matrix else [f"a{dim}" for dim in range(getattr(b, "ndim", 2) - 2)]
    ranks = _joined(**where)
    size = ranks.agree(
        layout, documents,
        {"b": (b, " ".join(["B n", *inner])), "a": (a, " ".join(["B n", *fits])),
         **_rest(initial_state, " ".join(inner), padding)},
        matrix=matrix, output_final_state=output_final_state,
    )  # fmt: skip
    state, decay = tuple(size[dim] for dim in inner), tuple(size[dim] for dim in fits)
    if not matrix and any(mine not in (1, full) for mine, full in zip(decay, state, strict=True)):
        raise InvalidInput(f"a {tuple(a.shape)} does not broadcast to b {tuple(b.shape)}")
    one = torch.eye(decay[-1], dtype=a.dtype, device=a.device) if matrix else a.new_ones(())
    if padding is not None:
        hidden = padding[(..., *[None] * len(inner))]
        a, b = torch.where(hidden, one, a), b.masked_fill(hidden, 0)

    def run(b: Tensor, a: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        return functions.affine_scan(a, b, matrix=matrix, **options)

    def maps(b: Tensor, a: Tensor, *, spans: list[bool], initial_state: Tensor | None, **options: Any) -> Any:
        start = one.expand(len(spans), *decay)
        product = run(torch.zeros_like(a), a, initial_state=start, output_final_state=True, **options)[1]
        return product, run(b, a, initial_state=initial_state, output_final_state=True, **options)[1]

    tensors = {"b": b, "a": a}
    scan = _Scan(ranks, tensors, documents, initial_state, state, decay, state, run, maps, matrix=matrix)
    return scan.run(output_final_state)


@_collective
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: str | Layout, activation: str | None = None,
    documents: Documents | None = None, padding: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, **where: Unpack[Where],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A short causal depthwise convolution over a sharded sequence. Collective.

    x [B, C, n]: the rows of this rank; weight [C, K], bias [C], K >= 1. activation: None, "silu" or "swish".
    padding: bool [B, n]; True marks tokens whose x counts as 0.
    initial_state: [B, C, K - 1], the inputs before the first token, equal on all ranks.

    The other arguments and the errors are those of `gated_delta_rule`. Returns (out [B, C, n], the last K - 1 inputs of
    the sequence [B, C, K - 1] on every rank, or None).
    """
    ranks = _joined(**where)
    size = ranks.agree(
        layout, documents,
        {"x": (x, "B C n"), "weight": (weight, "C K"), "bias": (bias, "C"),
         **_rest(initial_state, "C before", padding)},
        activation=activation, output_final_state=output_final_state,
    )  # fmt: skip
    if size.get("before", size["K"] - 1) != size["K"] - 1:
        raise InvalidInput(
            f"initial_state has {size['before']} earlier inputs, but a weight [C, K] with K={size['K']} needs K - 1 of "
            "them"
        )
    if activation not in (None, "silu", "swish"):
        raise InvalidInput(f"activation={shown(activation)}: expected None, 'silu' or 'swish'")
    x = x if padding is None else x.masked_fill(padding[:, None], 0)
    layout, width, batch, channels = ranks.layout, size["K"] - 1, size["B"], size["C"]
    token, x, weight, bias, initial_state = Open.apply(ranks, x, weight, bias, initial_state)
    rows = {r: y.transpose(1, 2).contiguous() for r, y in zip(ranks.local, ranks.shard(x, 2), strict=True)}
    initial = (
        x.new_zeros(batch, width, channels) if initial_state is None else initial_state.transpose(1, 2).to(x.dtype)
    )
    unit, zero, outs = batch * channels * x.element_size(), x.new_zeros(width, channels), []

    def history(piece: Piece, halos: Mapping[int, Tensor], target: int) -> Tensor:
        """The K - 1 inputs before a piece, [K - 1, C].

        They are those of its own document; before the document's start, the initial state (first document) or 0.
        """
        known = min(piece.before, width)
        rest = initial[piece.row] if piece.start == piece.before else zero
        return torch.cat([rest, halos[target][-known:, piece.row]])[-width:] if known else rest

    halos, token = _move_rows(ranks, plan_rows(layout, documents, width, unit), rows, token)
    for rank in ranks.local:
        if not (pieces := cut_pieces(layout, documents, rank, batch)):
            outs.append(x.new_zeros(batch, channels, 0))
            continue
        start = torch.stack([history(piece, halos, piece.run) for piece in pieces])
        flat = rows[rank].reshape(1, -1, channels)
        out = functions.causal_conv1d(
            flat, weight, bias, activation=activation, initial_state=start, cu_seqlens=_cu_seqlens(pieces)
        )
        outs.append(out.view(batch, -1, channels).transpose(1, 2))
    results = [ranks.unshard(outs, 2)]
    if output_final_state:
        plan = plan_rows(layout, None, width, unit, ends=True)
        halos, token = _move_rows(ranks, plan, rows, token)
        end = len(plan.runs) + ranks.local[0]
        last = [history(piece, halos, end) for piece in cut_ends(layout, documents, batch)]
        results.append(torch.stack(last).transpose(1, 2))
    _, out, *state = Close.apply(ranks, token, *results)
    return out, state[0] if state else None


def _move_rows(
    ranks: Ranks, plan: RunPlan, rows: Mapping[int, Tensor], token: Tensor
) -> tuple[dict[int, Tensor], Tensor]:
    """The rows before each target of `plan` [rows, B, C], from rows [B, n, C] by rank, and the next token."""
    halos: dict[int, list[Tensor]] = {}
    for hops in plan.rounds:  # one, or none
        most, (batch, _, channels) = dict[int, int](), rows[ranks.local[0]].shape
        for source, _, count in hops:
            most[source] = max(count, most.get(source, 0))
        units = {}
        for source, count in most.items():
            rank, start, stop, first = plan.runs[source]
            if rank in ranks.local:
                end = first + stop - start
                units[source] = rows[rank][:, end - count : end].transpose(0, 1).reshape(count, -1)
        got, token = ranks.move(plan, 0, units, rows[ranks.local[0]].new_empty(0, batch * channels), token)
        for source, target, count in hops:
            if (rank := plan.rank_of(target)) in ranks.local:
                halos.setdefault(target, []).append(got[rank, source][-count:].view(-1, batch, channels))
    return {target: torch.cat(parts) for target, parts in halos.items()}, token


def _blank(tensors: dict[str, Tensor], padding: Tensor | None) -> dict[str, Tensor]:
    """The tensors [B, n, ...] with 0 at padded tokens."""
    if padding is None:
        return tensors
    return {name: x.masked_fill(padding[(..., *[None] * (x.ndim - 2))], 0) for name, x in tensors.items()}


def _rest(initial_state: Tensor | None, state: str, padding: Tensor | None) -> dict[str, tuple[Tensor | None, str]]:
    """The arguments that all layers have, with the names of their dims."""
    return {"initial_state": (initial_state, f"B {state}"), "padding": (padding, "B n")}


def _name(function: Compute | None) -> str | None:
    if function is not None and (not callable(function) or isinstance(function, type)):
        raise InvalidInput(f"function={shown(function)}: give a function, or leave it out")
    named: Any = function if hasattr(function, "__qualname__") else type(function)  # a partial has no name
    return function and f"{named.__module__}.{named.__qualname__}"
