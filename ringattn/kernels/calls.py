"""Kernels that compute one work a call, and their visits: views of rows, calls, and merges of partial results."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ..pattern.tile import Tile
from ..plan.visit import Visit
from ..plan.work import Work, join_keys, join_repetitions
from .centre import Centre, restore
from .contract import CallData, KernelPass, OpChoice, Pair, QueryRows, Tensors, VisitKernel
from .dropout import key_steps, row_streams
from .memory import wide_zeros
from .pad import delta, times_unit, with_column, with_delta
from .softmax import begin_sums
from .sums import OutputAccumulator, merge_partial, plan_merges
from .views import RowViews, accumulate, batches, select_inputs


class Kernel(VisitKernel):
    """Base class of kernels that compute attention of one `Work`: some query rows and keys, and a mask between them.

    Inputs are q [B, H, rows, D], k [B, K, keys, D] and v [B, K, keys, Dv] with any strides. B is the batch; for a work
    that repeats with a fixed stride, B counts the repetitions, in one batch element. A subclass in one file is a
    complete kernel.
    """

    #: For a call with dropout: streams int64 [B, H, rows, 1] and steps int64 [B, K, keys, 1] for `weight_factors`.
    numbers: tuple[Tensor, Tensor] | None = None
    #: Where the work does not say it, the hidden pairs, bool [1 or H, rows, keys]; for a call of leaves also its tiles.
    hidden: Tensor | None = None
    tiles: tuple[Tile, ...] = ()

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        """The calls of each visit, and the rows without a pair."""
        if not backward and not any(visit.keys_stay for visit in visits):
            return plan_merges([visit.works for visit in visits], heads, rows, self.calls_of)
        calls_of = (self.for_backward() if backward else self).calls_of
        return [tuple(calls_of(join_repetitions(join_keys(visit.works)))) for visit in visits], ()

    def single(self) -> Kernel:
        return self

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return CallsPass(self, call, q, block)

    def op_of(self, call: Work, head_dim: int) -> str:
        """The name of the op that computes a call, which `split` has made."""
        return self.name

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute these works, how many calls each makes, and why other ops are not used."""
        calls = Counter(self.op_of(call, head_dim) for call in self.calls_of(works))
        return OpChoice(tuple(calls.items()))

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """Split a work into the calls that this kernel makes; they contain every pair of the work exactly once."""

    def pack(self, calls: list[Work]) -> list[Work]:
        """Combine calls that can be made together; returns the same or fewer calls, with the same pairs."""
        return calls

    def for_backward(self) -> Kernel:
        """The kernel whose `split` is used in a backward: a different one if other calls are faster there."""
        return self

    def calls_of(self, works: Iterable[Work]) -> list[Work]:
        """All calls that this kernel makes for some works that are computed together."""
        return self.pack([call for work in works for call in self.split(work)])

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        """Compute one call: returns (out [B, H, rows, Dv], lse [B, H, rows]), with any strides.

        out has the dtype of q, or fp32 (fp64 for fp64). Results of the same rows are merged in fp32, so a kernel that
        returns fp32 for 16-bit inputs saves one rounding per call. lse is fp32 (fp64 for fp64).
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of one call: (dq, dk, dv) in the shapes of q, k and v, in their dtype or in fp32.

        Any strides are allowed. The runtime sums the gradients of all calls in fp32 (fp64 for fp64) and rounds once at
        the end. It ignores columns beyond those of q, k and v.

        `grad` is dO [B, H, rows, Dv]. `out` and `lse` are the final results of the rows, over all keys that they see,
        so that P = exp(scale * q k^T - lse) and dS = P * (dO v^T - rowsum(dO * out)).
        """


class CallsPass(KernelPass):
    """One pass of a kernel that computes one work a call."""

    def __init__(self, kernel: Kernel, call: CallData, q: Tensor, block: Tensors) -> None:
        self.kernel, self.call, self.q, self.block = kernel, call, q, block
        self.centre = Centre(kernel, q, block[0], call.scale)
        #: Whether queries visit the keys of this rank (pass-Q), instead of keys its queries.
        self.keys_stay = call.stays.kind == "kv"
        #: Whether each call has a kernel of its own.
        self.varies = kernel.dropout is not None or call.chosen is not None
        #: The tensors that stay in all visits, as calls read them.
        self._own: RowViews | None = None

    def new_sums(self, out: Tensor | None) -> OutputAccumulator:
        return OutputAccumulator(self.q, self.block[1].shape[-1], out)

    def finish(self, sums: OutputAccumulator) -> Pair:
        return sums.finish(self.call.prepared, self.call.sinks)

    def new_grads(self) -> RowViews:
        stays = self.block if self.keys_stay else (self.q,)
        return RowViews(*map(wide_zeros, stays))

    def finish_grads(self, grads: RowViews) -> Tensors:
        return grads.tensors

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        if self.keys_stay:
            return self._visit_keys(visit, q, sums)
        own = self._own = self._own or RowViews(*self.centre.queries(q))
        keys = RowViews(self.centre.keys(block[0], visit.part.row_set), block[1])
        choose = self._choose_kernels(visit) if self.varies else None
        for part in visit.table:
            for call in part.calls:
                for batch in batches(call.work, len(q)):
                    kernel = self.kernel if choose is None else choose(call.work, batch)
                    partial = self._attend(kernel, call.work, batch, own, keys)
                    sums.add(part.section, call, *partial, batch)
                    del partial  # free it before the next call allocates its own
            if part.last:
                sums.close(part.section)
        return None

    def _visit_keys(self, visit: Visit, q: Tensor, sums: Tensors) -> None:
        """The forward of queries that visit this rank's keys."""
        own = self._own = self._own or RowViews(self.centre.keys(self.block[0]), self.block[1])
        queries, totals = RowViews(*self.centre.queries(q, visit.part.row_set)), RowViews(*sums)
        covers = visit.first and self._begin_sums(visit, totals)
        choose = self._choose_kernels(visit) if self.varies else None
        for work in visit.table:
            for batch in batches(work, len(q)):
                kernel = self.kernel if choose is None else choose(work, batch)
                partial = self._attend(kernel, work, batch, queries, own)
                merge_partial(totals, work, partial, batch, is_new=covers)
                del partial

    def _attend(self, kernel: Kernel, work: Work, batch: slice | None, by_query: RowViews, by_key: RowViews) -> Pair:
        """(out, lse) of a call, with lse for the keys before centring."""
        (q, *shifts), (k, v) = select_inputs(work, batch, by_query, by_key)
        out, lse = kernel.forward(q, k, v, work, self.call.scale)
        return out, lse + shifts[0] if shifts else lse

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: RowViews, travel: Tensors) -> None:
        if self.keys_stay:
            by_query, by_key = self._views_of_queries(visit, rows)
        else:
            by_query, by_key = self._views_of_keys(visit, rows, block)
        sums = RowViews(*travel)
        covers = visit.first and self._begin_sums(visit, sums)
        of_query, of_key = (sums, stay) if self.keys_stay else (stay, sums)
        choose = self._choose_kernels(visit) if self.varies else None
        for work in visit.table:
            for batch in batches(work, len(rows.q)):
                (grad, q, out, lse, *key), (k, v) = select_inputs(work, batch, by_query, by_key)
                kernel = self.kernel if choose is None else choose(work, batch)
                dq, *of_keys = kernel.backward(grad, q, k, v, out, lse, work, self.call.scale)
                dq = restore(dq, *key) if key else dq
                accumulate(of_query, work, batch, dq, is_new=covers and self.keys_stay)
                accumulate(of_key, work, batch, *of_keys, by_key=True, is_new=covers and not self.keys_stay)
                del dq, of_keys  # free them before the next call allocates its own

    def _views_of_keys(self, visit: Visit, rows: QueryRows, block: Tensors) -> tuple[RowViews, RowViews]:
        """What calls read by query, (dO, q, out, lse) and possibly the centre, and by key, if keys visit."""
        (k, v), has_lse = block, rows.grad_lse is not None
        wider = self.centre.moves or has_lse
        if self._own is None:
            grad, out = rows.grad, rows.out
            assert out is not None
            if rows.grad_lse is not None and self.kernel.dropout is None:
                out, grad = with_column(out, 0.0), with_column(grad, rows.grad_lse.to(grad.dtype))
            elif rows.grad_lse is not None:  # dropout scales dO v^T but not dlse, so dlse goes into delta
                grad, out = with_delta(grad, delta(grad, out, rows.grad_lse), wider=True)
            q = with_column(rows.q, 0.0) if wider else rows.q
            self._own = RowViews(grad, q, out, *self.centre.rows(rows.q, rows.lse))
        if has_lse:
            v = with_column(v, float(self.kernel.dropout is None))
        return self._own, RowViews(self.centre.keys(k, visit.part.row_set, wider=wider), v)

    def _views_of_queries(self, visit: Visit, rows: QueryRows) -> tuple[RowViews, RowViews]:
        """What calls read by query, (dO, q, out, lse) and possibly the centre, and by key, if queries visit."""
        wider = self.centre.moves or self.call.lse
        if self._own is None:
            k, v = self.block
            self._own = RowViews(self.centre.keys(k, wider=wider), with_column(v, 0.0) if self.call.lse else v)
        grad, number, of_row = rows.grad, rows.number, self.centre.rows(rows.q, rows.lse, visit.part.row_set)
        assert number is not None
        if self.call.number == "factor":
            out = times_unit(grad, number)
        else:
            grad, out = with_delta(grad, number, wider=self.call.lse)
        return RowViews(grad, with_column(rows.q, 0.0) if wider else rows.q, out, *of_row), self._own

    def _begin_sums(self, visit: Visit, sums: RowViews) -> bool:
        """Begin sums that are new; True if the visit's only call overwrites all of them."""
        if len(visit.table) == 1 and _covers(visit.table[0], sums.tensors[0], by_key=not self.keys_stay):
            return True
        if visit.part.kind == "query":
            begin_sums(*sums.tensors)
        else:
            for x in sums.tensors:
                x.zero_()
        return False

    def _choose_kernels(self, visit: Visit) -> Callable[[Work, slice | None], Kernel]:
        """With dropout or chosen keys, a function that returns the kernel for each call of a visit."""
        dropout, call, chosen = self.kernel.dropout, self.call, self.call.chosen
        queries, keys = (visit.part, call.stays) if self.keys_stay else (call.stays, visit.part)
        (heads, rows), (kv_heads, columns) = call.places(queries), call.places(keys)
        batch, by_row = len(self.q), [] if chosen is None else [chosen.keys]
        by_key = RowViews(columns.expand(batch, len(kv_heads), -1).unsqueeze(-1))
        if dropout is not None:
            assert dropout.seed is not None
            by_row.append(row_streams(dropout.seed, batch, heads + call.heads.start, rows))
        by_row_views = RowViews(*by_row)

        def choose(work: Work, elements: slice | None) -> Kernel:
            of_rows, (positions,) = select_inputs(work, elements, by_row_views, by_key)
            return self.kernel.derive(
                numbers=None if dropout is None else (of_rows[-1], key_steps(positions)),
                chosen=None if chosen is None else (of_rows[0], positions, chosen),
            )

        return choose


def _covers(work: Work, total: Tensor, *, by_key: bool) -> bool:
    """Whether this call alone computes every row of the sums `total` [B, H, n, ...]."""
    batch, heads, rows, *_ = total.shape
    of = (work.kv, work.k) if by_key else (work.heads, (work.q,))
    covers = work.repeat == 1 and not work.gathered and of == (range(heads), (range(rows),))
    return covers and tuple(batches(work, batch)) == (None,)
