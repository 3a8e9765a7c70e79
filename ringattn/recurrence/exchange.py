"""The ranks of a layer's call, and the differentiable exchange of states and rows between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from ..call.functional import find_ranks, run_programs
from ..call.handshake import agree_backward, spell_layout
from ..dtypes import check_type, dtype_name
from ..errors import InvalidInput, Mismatch, RingAttentionError
from ..kernels.memory import is_dense, kind_of
from ..layout.regular import Layout, check_layout, make_layout, name_rows
from ..pattern.documents import Documents
from ..text import shown
from ..transport.base import TAG_BITS, Message, Post, Program, Tags, Transport, Wait
from ..transport.records import ErrorReport, Exchange, compare, compare_records, digest
from ..transport.virtual import VirtualRanks
from .runs import RunPart, RunPlan, list_runs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack


class Where(TypedDict, total=False):
    """The keyword arguments that choose the ranks of a call: at most one of them may be given.

    They are a group, a mesh, a transport, or a number of virtual ranks in this process.
    """

    group: ProcessGroup | DeviceMesh | None
    mesh: DeviceMesh | None
    transport: Transport | None
    ranks: int | None


#: The types of arguments of layers that are no tensors.
TYPES = {"scale": "float | None", "output_final_state": "bool"}
#: What the ranks of this process have received, by (rank, source).
Received = dict[tuple[int, int], Tensor]


class Ranks:
    """The ranks that take part in one call of a recurrent layer: real ranks, or virtual ranks in this process.

    On real ranks each process has its own rows; with virtual ranks one process has all rows.
    """

    layout: Layout

    def __init__(self, layer: str, **where: Unpack[Where]) -> None:
        self.layer = layer
        self.place, self.local = find_ranks(**where)
        self.transport = None if isinstance(self.place, VirtualRanks) else self.place
        #: Tells the other ranks what this rank raises: first in place of its arguments, and after those at once.
        self.report = None if self.transport is None else ErrorReport(self.transport, layer, once=True)
        self.number = 0

    def agree(
        self, layout: str | Layout, documents: Documents | None, tensors: Mapping[str, tuple[Tensor | None, str]],
        **facts: object,
    ) -> dict[str, int]:  # fmt: skip
        """The sizes by dim name, after ranks have compared their arguments; also sets `self.layout`. Collective.

        `tensors` are given with the names of their dims, such as "B n H K"; n is the dim that is sharded. Raises
        InvalidInput, Unsupported or Mismatch on every rank.
        """
        for name in TYPES.keys() & facts:
            check_type(name, facts[name], TYPES[name])
        given, sizes = dict[str, Tensor](), dict[str, int]()
        for name, (x, dims) in tensors.items():
            if x is not None or name not in ("bias", "initial_state", "padding"):
                given[name] = _measure(name, x, dims, sizes)
        if documents is not None and not isinstance(documents, Documents):
            raise InvalidInput(f"documents={shown(documents)}: give Documents, such as Documents([4, 5])")
        check_layout(layout, "layout")
        held = [sizes["n"]]
        if self.transport is not None and self.report is not None:
            self.transport.check(device := next(iter(given.values())).device)
            record = {
                "tensors": _spell(given, tensors),
                "device": device.type,
                "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in given.values()),
                "documents": documents and digest(repr(documents).encode()).hex(),
                **{name: str(value)[:200] for name, value in facts.items()},
                "layout": spell_layout(layout),
                "rows": [sizes["n"], None if isinstance(layout, str) else [layout.tokens, layout.ranks, layout.digest]],
            }
            mine = json.dumps(record).encode()
            # All ranks raise alike what is wrong with the arguments of all.
            self.report.deferred, self.report.common = True, (RingAttentionError, _StopRecomputationError)
            with Exchange(self.transport, self.layer) as exchange:
                exchange.mine = mine
            self.number = self.transport.events << TAG_BITS
            rows = [fields["rows"] for fields in compare_records(exchange.records)]
            held = [count for count, _ in rows]
            made = [str(given or [sum(held), self.place.size, ""]) for _, given in rows]
            compare({rank: {"tokens, ranks and partition of the layout": x} for rank, x in enumerate(made)})
        tokens = sum(held)
        if not isinstance(layout, Layout):
            layout = make_layout(name_rows(layout, held), tokens=tokens, ranks=self.place.size)
        self.layout, planned = layout, [*layout.lengths]
        if planned != held and (self.transport or (layout.tokens, layout.ranks) != (tokens, self.place.size)):
            raise Mismatch(
                f"the shards do not fit the layout {layout.name} of {layout.tokens:,} tokens over {layout.ranks} "
                f"ranks: they hold {held} rows, the layout gives {planned}; shard with its method shard_tensor(x, rank)"
            )
        list_runs(layout)  # raises for too many
        if documents is not None:
            documents.check(tokens, 1)
            if documents.rows not in (None, sizes["B"]):
                raise InvalidInput(
                    f"{documents.rows} rows of documents for a batch of {sizes['B']}; give one for each row"
                )
        return sizes

    def shard(self, x: Tensor, dim: int) -> list[Tensor]:
        """The rows of each rank in this process, cut from x along `dim`: x itself on a real rank."""
        return [x] if self.transport is not None else self.layout.shard_all(x, dim)

    def unshard(self, shards: list[Tensor], dim: int) -> Tensor:
        """Undo `shard`: join the rows of each rank in this process along `dim`, in order of position."""
        if self.transport is not None:
            return shards[0]
        order = torch.cat([torch.from_numpy(self.layout.positions(rank)) for rank in self.local])
        return torch.cat(shards, dim).index_select(dim, order.argsort().to(shards[0].device))

    def move(
        self, plan: RunPlan, number: int, units: Mapping[int, Tensor], like: Tensor, token: Tensor
    ) -> tuple[Received, Tensor]:
        """Exchange round `number` of `plan`; returns (what the ranks of this process receive, next autograd token).

        `units` holds a tensor [rows, width] for each run; `like` has 0 rows of the same width. Tokens chain the
        exchanges of a call, so that all ranks differentiate them in the same order.
        """
        parts = plan.parts[number]
        sends = {part: units[part.source][-part.rows :] for part in parts if part.sender in self.local}
        receives = tuple(part for part in parts if part.receiver in self.local)
        token, *got = _Swap.apply(self, (*sends,), receives, like, plan.way, number, False, token, *sends.values())
        return {(part.receiver, part.source): x for part, x in zip(receives, got, strict=True)}, token

    def swap(
        self, sends: Mapping[RunPart, Tensor], receives: Sequence[RunPart], like: Tensor, tag: int, what: str
    ) -> list[Tensor]:
        """Send the tensors in `sends`, in one message per receiver, and return those listed in `receives`."""
        programs = []
        for rank in self.local:
            theirs = [(part, x) for part, x in sends.items() if part.sender == rank != part.receiver]
            mine = [part for part in receives if part.receiver == rank != part.sender]
            programs.append(_exchange(theirs, mine, like, tag, what))
        with self.report or nullcontext():
            results = run_programs(programs, self.place)
        got = {part: x for result in results for part, x in result.items()}
        return [sends[part].clone() if part.sender == part.receiver else got[part] for part in receives]


def _measure(name: str, x: object, dims: str, sizes: dict[str, int]) -> Tensor:
    """Add the sizes of x to `sizes`; returns x. Raises InvalidInput for another number of dims, size, or dtype."""
    names, wanted = dims.split(), "bool" if name == "padding" else "floating-point"
    if (
        not is_dense(x)
        or x.ndim != len(names)
        or (x.dtype != torch.bool if name == "padding" else not x.is_floating_point())
    ):
        kind = f"{dtype_name(x.dtype)} {tuple(x.shape)}" if is_dense(x) else kind_of(x)
        raise InvalidInput(f"{name} must be a {wanted} tensor [{dims}], got {kind}")
    for dim, size in zip(names, x.shape, strict=True):
        if sizes.setdefault(dim, size) != size:
            raise InvalidInput(
                f"{name} {tuple(x.shape)} is read as [{dims}], but {dim} is {sizes[dim]} in the arguments before it"
            )
        if not size and dim not in ("n", "before"):
            raise InvalidInput(f"{name} {tuple(x.shape)} is read as [{dims}], but {dim} is 0; only n (tokens) may be 0")
    return x


def _spell(given: Mapping[str, Tensor], tensors: Mapping[str, tuple[Tensor | None, str]]) -> str:
    """The shapes and dtypes without the number of rows, and without padding, which not all ranks may have."""
    spelled = []
    for name, x in given.items():
        shape = ["n" if dim == "n" else str(size) for dim, size in zip(tensors[name][1].split(), x.shape, strict=True)]
        spelled.append(f"{name} [{', '.join(shape)}] {dtype_name(x.dtype)}")
    return ", ".join(one for one in spelled if not one.startswith("padding"))


def _exchange(
    sends: Sequence[tuple[RunPart, Tensor]], receives: Sequence[RunPart], like: Tensor, tag: int, what: str
) -> Program[dict[RunPart, Tensor]]:
    """A rank's program: one message of concatenated parts to each peer, and one from each peer."""
    to, wanted = dict[int, list[Tensor]](), dict[int, list[RunPart]]()
    for part, x in sends:
        to.setdefault(part.receiver, []).append(x.reshape(-1))
    for part in receives:
        wanted.setdefault(part.sender, []).append(part)
    width = like.shape[-1]
    buffers = {peer: like.new_empty(sum(part.rows for part in parts), width) for peer, parts in wanted.items()}
    out = tuple(Message(peer, tag, torch.cat(parts).view(torch.uint8)) for peer, parts in to.items())
    into = tuple(Message(peer, tag, x.view(-1).view(torch.uint8)) for peer, x in buffers.items())
    if out or into:
        ticket = yield Post(out, into, what)
        yield Wait(ticket)
    return {
        part: x
        for peer, parts in wanted.items()
        for part, x in zip(parts, buffers[peer].split([part.rows for part in parts]), strict=True)
    }


class _Swap(torch.autograd.Function):
    """`Ranks.swap`. Its derivative is the swap of the gradients the other way, which can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sends: tuple[RunPart, ...], receives: tuple[RunPart, ...], like: Tensor, way: str,
        number: int, backward: bool, token: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.ranks, ctx.parts, ctx.others = ranks, (receives, sends), (like, way, number, not backward)
        tag = Tags.of_call(ranks.number, backward=backward).of(number)
        what = f"{'gradients of a ' if backward else ''}{way} of runs"
        return token.clone(), *ranks.swap(dict(zip(sends, tensors, strict=True)), receives, like, tag, what)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = [tuple(x._replace(sender=x.receiver, receiver=x.sender) for x in parts) for parts in ctx.parts]
        return *(None,) * 7, *_Swap.apply(ctx.ranks, *back, *ctx.others, *grads)


class Open(torch.autograd.Function):
    """Returns the first autograd token of a call, an empty tensor that ties its exchanges together, and the inputs.

    Every exchange takes a token and returns the next one. The backward therefore runs all exchanges, in order on every
    rank, before it returns a gradient. Gradients of tensors that do not affect this rank's output are zeros, not None.

    With create_graph=True the backward is such a call, too: it begins with `Open` in the backward of `Close`, and ends
    with `Close` in that of `Open`. So all ranks run the exchanges of second derivatives in one order, too.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ranks, opened = ranks, [x if x is None else x.view_as(x) for x in inputs]
        if ranks.report is not None:  # messages begin: the other ranks do not raise alike what this rank raises
            ranks.report.common = (_StopRecomputationError,)
        ctx.mark_non_differentiable(
            *(x for x, needed in zip(opened, ctx.needs_input_grad[1:], strict=True) if x is not None and not needed)
        )
        return next(x for x in inputs if x is not None).new_zeros(()), *opened

    @staticmethod
    def backward(ctx: Any, token: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.ranks.transport is not None:
            ctx.ranks.watch.detach()  # the last exchange has ended
        return None, *(Close.apply(ctx.ranks, token, *grads)[1:] if torch.is_grad_enabled() else grads)


class Close(torch.autograd.Function):
    """Returns a call's last autograd token and its results unchanged, but tied to the token.

    A rank that differentiates any of the results then takes part in every exchange of the backward.
    """

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, token: Tensor, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ranks, ctx.number, token = ranks, ranks.number, token.clone()
        ctx.save_for_backward(token)
        # Not views, which must not be modified in place.
        return token, *(x if x is None else x.detach() for x in results)

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Any, ...]:
        ranks, (last,) = ctx.ranks, ctx.saved_tensors
        if (ring := ranks.transport) is not None:
            with ErrorReport(ring, "backward", deferred=True, common=(RingAttentionError,)):
                agree_backward(ring, ctx.number, deferred=False)
            ranks.number = ring.events << TAG_BITS  # the backward's own, if it is differentiated
            # Where a node that is not ours raises, torch drops its callbacks: the others are told unless `Open` ended.
            end = lambda: ranks.watch.detach()  # noqa: E731
            why = f"an exception has ended its backward of {ranks.layer}. Look at that rank's own traceback"
            ranks.watch = finalize(end, ring.fail, why)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        # `last` makes the exchanges of this call's backward wait for those of the backward of its backward.
        token, _, *grads = Open.apply(ranks, last, *grads)
        return None, token, *grads
