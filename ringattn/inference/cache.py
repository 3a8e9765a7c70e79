"""`KVCache`: keys and values for generation, sharded over ranks, and attention of new tokens to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..call.arguments import cast_inputs, check_option_names, computing
from ..call.compile import CompiledCall, compile_call
from ..call.functional import find_ranks, ring_attention, run_programs, virtual_attention
from ..call.handshake import LIMIT
from ..call.rows import Rows
from ..dtypes import check_type
from ..errors import InvalidInput, Mismatch, Unsupported
from ..kernels.base import as_dtype, wide
from ..kernels.softmax import merge_sinks_
from ..layout import Layout, nonempty
from ..layout.composed import shift_layout
from ..layout.regular import make_layout
from ..machine.presets import get_machine
from ..pattern import Pattern, as_pattern
from ..pattern.base import check_integer
from ..pattern.tile import clip, find_runs, shift_range
from ..pattern.views import Shifts
from ..plan.row_sets import Ranges
from ..text import plural, shown
from ..transport.base import TAG_BITS, Program, Tags
from ..transport.records import FINGERPRINT_BYTES, ErrorReport, Exchange, compare_records, digest
from ..transport.virtual import VirtualRanks
from . import MERGES, WINDOWS, merge_seconds
from .choice import Chooser, attend_chosen, check_chooser, find_seen, held_keys, join_candidates, list_slots
from .holdings import Holdings, split, take
from .partials import RowGroups, attend, gather_rows, merge_ranks
from .slots import SlottedPattern, add_tokens, crop_tokens, find_slot
from .store import SHARED_ROWS, LayerStore, of_both

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ..call.arguments import AttentionKeywords
    from ..transport.base import Transport

#: The options of attention that a step takes.
STEP_OPTIONS = ("kernel", "scale", "softcap", "deterministic", "machine", "check")


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one prompt chunk or one step, while the layers process them one after another."""

    kind: str
    new: range
    #: The slots of new tokens that each rank owns.
    shards: tuple[Ranges, ...]
    layout: Layout | None
    todo: set[int]
    number: int
    #: The first layer's call of a step whose later layers ranks can decline, see `_decline`; else None.
    call: CompiledCall | None


class KVCache:
    """A cache of keys and values for `layers` layers, sharded over ranks; it computes attention of new tokens to them.

    patterns: one pattern for all layers, or one for each, as a Pattern or its text, over positions. A pattern for one
        length only, such as Documents or a family with density=, needs that length as `max_tokens`.
    group, mesh, transport: the ranks, as in `ring_attention`; or give `ranks`, a number of virtual ranks in this
        process: tensors then hold the rows of all ranks, in natural order.
    layout: the name of the layout that shards each prompt chunk. Rows stay on the ranks that computed them.
    page: tokens per page. New tokens of a step fill one page after another, page p is on rank p % P, and memory grows
        and is freed by pages. The cache drops rows that no later query sees; it keeps enough of them that `crop` can go
        back by one page.
    max_tokens: the maximum number of tokens of a row.
    merge: how a step merges the results of the P ranks: "gather" in one round of P - 1 messages per rank, "scatter" in
        two rounds with 2 / P of the bytes, or "auto", the way that is predicted to be faster on `machine`.
    windows: where layers with a window, whose queries see a bounded number of keys, hold them: "shard", spread over the
        ranks as in other layers; or "copy", whole on every rank, so that a step of these layers sends no message.
    dtype: the dtype that keys and values are rounded to and stored in; None: their own.

    Only `prefill` and `step` are collective. Call every layer once for each chunk and each step; in the first of these
    calls the ranks compare their caches. Results have no gradient. Raises InvalidInput.
    """

    def __init__(
        self,
        patterns: Pattern | str | Sequence[Pattern | str],
        *,
        layers: int,
        group: ProcessGroup | DeviceMesh | None = None,
        mesh: DeviceMesh | None = None,
        transport: Transport | None = None,
        ranks: int | None = None,
        layout: str = "zigzag",
        page: int = 64,
        max_tokens: int | None = None,
        merge: str = "auto",
        windows: str = "shard",
        dtype: torch.dtype | None = None,
    ) -> None:
        layers, self.page = check_integer(layers, "layers", 1, "layers=32"), check_integer(page, "page", 1, "page=64")
        check_type("patterns", patterns, "Pattern | str | Sequence")
        of_layers = [patterns] * layers if isinstance(patterns, Pattern | str) else [*patterns]
        if len(of_layers) != layers:
            raise InvalidInput(
                f"{plural(len(of_layers), 'pattern')} for layers={layers}; give one for each, or one for all"
            )
        for name, value, names in (("merge", merge, MERGES), ("windows", windows, WINDOWS)):
            if value not in names:
                raise InvalidInput(f"{name}={shown(value)}: expected one of {', '.join(names)}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidInput(f"dtype={shown(dtype)}: expected a floating-point torch.dtype, such as torch.bfloat16")
        self.patterns = tuple(map(as_pattern, of_layers))
        self.layout, self.merge, self.windows, self.dtype = layout, merge, windows, dtype
        self.max_tokens = None if max_tokens is None else check_integer(max_tokens, "max_tokens", 1, "max_tokens=4096")
        #: The transport of the ranks; its counters count the messages and bytes of steps.
        self.transport, self._ranks = find_ranks(group, mesh, transport, ranks)
        #: The same if the ranks are processes; None: virtual ranks, and tensors hold the rows of all ranks.
        self._ring = None if isinstance(self.transport, VirtualRanks) else self.transport
        size = self.transport.size
        shift_layout(made := make_layout(layout, tokens=size, ranks=size, pattern=self.patterns[0]), size)
        if made.domain != (range(size),):
            raise InvalidInput(
                f"layout={layout!r} cannot cut a chunk that begins after position 0, as a cache needs; try "
                "layout='zigzag'"
            )
        spelled = f"{self.patterns}, {layout=}, {page=}, {max_tokens=}, {merge=}, {windows=}, {dtype=}"
        self._spelled = spelled if len(spelled) < 1024 else digest(spelled.encode()).hex()
        self._slotted: dict[Pattern, SlottedPattern] = {}
        self._event: NewTokens | None = None
        self._chunk: tuple[Layout, Tensor | None] | None = None
        self._count, self._history = 0, b""
        self._forget()

    def _forget(self) -> None:
        """Become empty, like a new cache."""
        #: Tokens so far, including padding.
        self.length = 0
        #: Tokens of each row of the batch so far, without padding; empty before the first ones.
        self.lengths: list[int] = []
        self._shifts: list[Shifts] = []
        self._stores = [[LayerStore(self.page) for _ in self.patterns] for _ in self._ranks]
        self._holdings: dict[Pattern, Holdings] = {}
        #: The query heads; 0 before the first tokens.
        self._heads = 0

    # What the cache holds.

    def rows(self, layer: int, rank: int | None = None) -> Ranges:
        """The slots (places in the cache, padding included) that a rank holds in a layer, in its order."""
        holdings = self._holdings.get(self.patterns[layer])
        blocks = holdings.held[self._ranks[0] if rank is None else rank] if holdings else []
        return tuple(run for block in blocks for run in block)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in this process, including the unused rest of pages."""
        return sum(store.nbytes for stores in self._stores for store in stores)

    @property
    def least(self) -> int:
        """The fewest tokens, including padding, that `crop` can keep, unless it empties the cache."""
        return max((holdings.floor for holdings in self._holdings.values()), default=0)

    # What is not collective.

    def shard(self, tokens: int, padding: Tensor | None = None) -> Tensor:
        """Begin a prompt chunk of `tokens` tokens. Returns the slots of this rank's rows, int64 [n], in local order.

        Discards a chunk that was begun and not prefilled. In rows without padding, a slot is a position. With virtual
        ranks, the slots are those of all tokens. `padding`, bool [B, tokens] and equal on all ranks, is True for
        padding, which has no position, and which no query sees. Raises InvalidInput.
        """
        self._check_event("shard")
        size, first = self.transport.size, self.length
        self._check_room(check_integer(tokens, "tokens", 1, "tokens=4096"))
        layout = make_layout(self.layout, tokens=tokens, ranks=size, pattern=self.patterns[0])
        fits = isinstance(padding, Tensor) and padding.dtype == torch.bool and padding.shape[1:] == (tokens,)
        if padding is not None and not fits:
            got = f"{padding.dtype} {tuple(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
            raise InvalidInput(f"padding must be a tensor, bool [batch, {tokens}], got {got}")
        self._chunk = layout, padding
        if self._ring is None:
            return torch.arange(first, first + tokens, device="cpu")
        return torch.from_numpy(layout.positions(self._ranks[0])) + first

    def crop(self, tokens: int | Sequence[int]) -> None:
        """Remove the last tokens: keep the first `tokens` slots or, if `tokens` < 0, remove the last -`tokens` slots.

        A single number counts slots, which include padding. A sequence gives the number of tokens, without padding, to
        keep for each row of the batch. After removing all tokens, the cache is like new and takes any batch size.
        Raises InvalidInput if rows would be needed that were already dropped.
        """
        self._check_event("crop")
        if isinstance(tokens, int | np.integer):
            length = int(tokens) if tokens >= 0 else self.length + int(tokens)
            cuts = [length] * len(self.lengths)
        else:
            tokens = _whole_numbers("crop", tokens)
            if len(tokens) != len(self.lengths) or not all(
                0 <= n <= m for n, m in zip(tokens, self.lengths, strict=True)
            ):
                raise InvalidInput(
                    f"crop({tokens}): the rows hold {self.lengths} tokens; give at most as many for each"
                )
            cuts = [find_slot(shifts, n - 1) + 1 if n else 0 for shifts, n in zip(self._shifts, tokens, strict=True)]
            length = max(cuts, default=0)
        if not 0 <= length <= self.length:
            raise InvalidInput(
                f"crop({tokens}): the cache holds {plural(self.length, 'token')}; give at most that many"
            )
        if any(0 < cut < self.least for cut in cuts):
            raise InvalidInput(
                f"crop({tokens}): the next token would need tokens that the cache has already dropped; keep at least "
                f"{self.least} tokens, or make the cache with page= above {self.page}, so that it drops them later"
            )
        self._note("crop", tokens)
        if not length:
            return self._forget()
        for row, cut in enumerate(cuts):
            self.lengths[row], self._shifts[row] = crop_tokens(self._shifts[row], cut, length)
        self.length = length
        for pattern, holdings in self._holdings.items():
            kept = holdings.keep(nonempty(range(length)))
            for rank, stores in zip(self._ranks, self._stores, strict=True):
                for layer in self._layers(pattern):
                    stores[layer].trim(kept, rank)
            holdings.settle()

    def fork(self, rows: Sequence[int] | Tensor) -> None:
        """Replace the rows of the batch: the new row i continues the old row rows[i], as beam search needs it.

        New rows share memory where they can. Raises InvalidInput for a row outside the batch.
        """
        self._check_event("fork")
        rows = _whole_numbers("fork", rows)
        if not rows or not all(0 <= row < len(self.lengths) for row in rows):
            raise InvalidInput(f"fork({rows}): expected numbers of rows from 0 to {len(self.lengths) - 1}")
        if any(pattern.rows is not None for pattern in self.patterns):
            raise Unsupported("fork: a pattern differs between rows of the batch, which fork would reorder")
        self._note("fork", rows)
        self.lengths, self._shifts = [self.lengths[i] for i in rows], [self._shifts[i] for i in rows]
        for pattern, holdings in self._holdings.items():
            for rank in range(self.transport.size):
                seal = sum(map(len, holdings.held[rank][-1])) > SHARED_ROWS
                if rank in self._ranks:
                    for layer in self._layers(pattern):
                        self._stores[rank - self._ranks[0]][layer].fork(rows, seal=seal)
                if seal:
                    holdings.seal(rank)

    # What is collective.

    def prefill(
        self, layer: int, q: Tensor, k: Tensor | Rows, v: Tensor | None = None, *, sinks: Tensor | None = None,
        chosen: Chooser | Tensor | None = None, **options: Unpack[AttentionKeywords],
    ) -> Tensor:  # fmt: skip
        """Attention of a prompt chunk: out [B, H, n, Dv] of the local rows. Collective.

        q [B, H, n, D], k [B, K, n, D] and v [B, K, n, Dv] are the rows that `shard` gave this rank, after rotary
        embeddings. Without v, the keys are the values, too, and are held once. Rows of one tensor in place of k are
        held as they are, such as latents, and expanded at the visits. `sinks`, `options` and errors are those of
        `ring_attention`. With `chosen`, a Chooser or the slots of one of an earlier layer, queries attend only to the
        keys that are chosen. If the cache or the chunk of a rank differs, every rank raises Mismatch.
        """
        opens = self._event is None
        with self._refusing("prefill", layer, options.get("check")):
            if self._chunk is None and self._ring is None and opens:
                self.shard(q.shape[2])
            q, k, v, call = self._read(layer, q, k, v, sinks, options, chosen)
            if opens and self._chunk is None:
                raise InvalidInput("prefill: call shard(tokens) first, which cuts the chunk into shards")
            padding = self._chunk[1] if opens and self._chunk else None
            if padding is not None and len(padding) != q.shape[0]:
                raise InvalidInput(f"padding has {plural(len(padding), 'row')}, and q a batch of {q.shape[0]}")
            self._check_event("prefill", layer)
        rows = k if isinstance(k, Rows) else None
        if isinstance(k, Rows):
            k = v = k.tensors[0]
        event, pattern = self._event or self._begin("prefill", call, "", chosen), self.patterns[layer]
        event.todo.remove(layer)
        with self._report("prefill", deferred=True):
            index = chosen.keys if isinstance(chosen, Chooser) else None
            own: list[tuple[Tensor, Tensor, Tensor | None]] = [(k, v, index)]
            if self._ring is None:
                assert event.layout is not None
                cuts = [partial(event.layout.shard_tensor, rank=rank) for rank in self._ranks]
                own = [(*of_both(cut, k, v), None if index is None else cut(index)) for cut in cuts]
            shards = [*zip(self._ranks, own, strict=True)]
            keys = [self._keys_of(event, rank, layer, *x) for rank, x in shards]
        if isinstance(chosen, Chooser):
            self._choose(event, layer, chosen, call, agreed=opens)
            chosen = chosen.chosen
        out = self._attend(event, pattern, q, keys, rows, {**options, "sinks": sinks, "chosen": chosen})
        with self._report("prefill", deferred=True), computing(call.device):
            run_programs([self._share(event, rank, layer, *x[:2]) for rank, x in shards], self.transport)
        return self._end(out)

    def _choose(self, event: NewTokens, layer: int, chooser: Chooser, call: CompiledCall, *, agreed: bool) -> None:
        """Fill the choice of a chunk, by what an indexer knows of all tokens, which travels. Collective.

        Unless ranks have just agreed, one may refuse the layer; the others hear of it where they would in attention.
        """
        if self._ring is not None and not agreed and not self._ring.defers(call.options.check):
            with Exchange(self._ring, "call"):
                pass
        pattern, stores = self.patterns[layer], [stores[layer] for stores in self._stores]
        held = self._holdings[pattern].keys
        assert held is not None
        counts = [sum(map(len, runs)) for runs in held.shards]
        tag, label = self._tags(event, layer, index=True).of(0), f"prefill of layer {layer}, keys of its indexer"
        groups = self._slotted[pattern].groups(self._shifts)
        q = (event.new,) if self._ring is None else event.shards[self._ranks[0]]
        every, batch = tuple(run for runs in held.shards for run in runs), len(self.lengths)

        def seen(part: slice) -> Tensor:
            rows = tuple(take(q, range(part.start, part.stop)))
            return find_seen(groups, rows, every, self._heads, batch, call.device)

        with self._report("prefill", deferred=True), computing(call.device):
            pairs = zip(self._ranks, stores, strict=True)
            programs = [gather_rows(rank, counts, held_keys(store, chooser), tag, label) for rank, store in pairs]
            chooser.find(run_programs(programs, self.transport)[0], list_slots(every, call.device), seen)

    def _tags(self, event: NewTokens, layer: int, *, index: bool = False) -> Tags:
        """Two tags for a layer's messages: those of partials and rows, or those of its indexer."""
        return Tags(Tags.of_call(event.number, backward=False).first + 4 * layer + index, 2)

    def _keys_of(
        self, event: NewTokens, rank: int, layer: int, k: Tensor, v: Tensor, index: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The rows of a rank that a chunk's queries attend: those held, then those of the chunk. Stores the latter."""
        holdings, store = self._holdings[self.patterns[layer]], self._stores[rank - self._ranks[0]][layer]
        if holdings.copies:
            held = store.whole()
            own = holdings.part(rank, held[0].shape[2] if held else 0)
            parts = [x[:, :, own.start : own.stop].to(k.dtype) for x in held]
            return tuple(torch.cat(pair, 2) for pair in zip(parts, (k, v), strict=True)) if held else (k, v)
        store.append(*of_both(self._rounded, k, v), index)
        if not event.new.start:
            return k, v
        return tuple(as_dtype(x, k.dtype) for x in store.whole()) or (k, v)

    def _attend(
        self, event: NewTokens, pattern: Pattern, q: Tensor, keys: list[tuple[Tensor, ...]], rows: Rows | None,
        options: Any,
    ) -> Any:  # fmt: skip
        """Attention of a chunk's queries to `keys`, which has an entry for each rank of this process.

        They are tensors in place of those of `rows`, if these are given.
        """
        layouts: dict[str, Any] = {"layout": event.layout}
        if event.new.start:
            assert event.layout is not None
            layouts = {"layout": self._holdings[pattern].keys, "q_layout": shift_layout(event.layout, event.new.start)}
        view, options = self._slotted[pattern].view(self._shifts), {**options, **layouts}
        if self._ring is not None:
            k, v = keys[0]
        else:
            k, v = (layouts["layout"].unshard_tensor(shards) for shards in zip(*keys, strict=True))
        block: tuple[Any, Any] = (k, v) if rows is None else (rows.replaced((k,), rows.weights), None)
        if self._ring is not None:
            return ring_attention(q, *block, view, transport=self._ring, **options)
        return virtual_attention(q, *block, view, ranks=self.transport.size, **options)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None = None, *, sinks: Tensor | None = None,
        chosen: Chooser | Tensor | None = None, return_lse: bool = False, note: str = "",
        **options: Unpack[AttentionKeywords],
    ) -> Any:  # fmt: skip
        """Add T >= 1 new tokens; returns their attention, out [B, H, T, Dv], with equal bits on all ranks. Collective.

        All ranks hold the new tokens: q [B, H, T, D], k [B, K, T, D] and v [B, K, T, Dv] are equal on all ranks, after
        rotary embeddings; without v, the keys are the values, too. `sinks` [H] are those of `ring_attention`. `options`
        are kernel, scale, softcap, deterministic, machine and check of `ring_attention`. With `return_lse` returns
        (out, lse [B, H, T]). `note` is a text that must be equal on all ranks, such as a digest of the tokens; ranks
        compare the `note` given with the first layer. `chosen` is that of `prefill`, for all new tokens: each rank
        sends its best tokens, (score, slot), and attends to those of the choice that it holds, with any kernel by plain
        matrix products.

        If the caches or steps of the ranks differ, every rank raises Mismatch. Raises CommFailure if a rank has ended,
        InvalidInput and Unsupported. After an error in the checks of a call, call the layer again. In later layers
        than the first, such an error ends the group's calls with check="deferred", on CUDA, in a layer with copies, or
        with `chosen`.
        """
        with self._refusing("step", layer, options.get("check"), ends=chosen is not None):
            check_option_names(options, STEP_OPTIONS)
            q, k, v, call = self._read(layer, q, k, v, sinks, options, chosen)
            if not call.rows:
                raise InvalidInput(f"step: q {tuple(q.shape)} has no new token; give at least one")
            self._check_event("step", layer, call.rows)
            self._check_room(call.rows)
        event = self._event or self._begin("step", call, note, chosen)
        event.todo.remove(layer)
        with self._report("step", deferred=True), computing(call.device):
            q, k, v = call.prepare(q, k, v, None)
            merge, groups = self._choose_merge(call), self._slotted[self.patterns[layer]].groups(self._shifts)
            new = of_both(self._rounded, k, v)
            programs = [self._step(event, rank, layer, q, new, groups, merge, call, chosen) for rank in self._ranks]
            out, lse = run_programs(programs, self.transport)[0]
            if sinks is not None:
                merge_sinks_(out, lse, sinks)
            scale = self.patterns[layer].output_scale
            out = as_dtype(out if scale == 1.0 else out * scale, q.dtype)
        return self._end((out, lse) if return_lse else out)

    def _choose_merge(self, call: CompiledCall) -> str:
        """How the ranks merge the partials of a step, see `merge_seconds`."""

        def choose() -> str:
            machine, sizes = get_machine(call.options.machine, call.device.type), call.sizes
            numbers = sizes["batch"] * sizes["heads"] * call.q_rows * (sizes["value_dim"] + 1)
            size = numbers * wide(getattr(torch, sizes["dtype"])).itemsize
            return merge_seconds(machine, size, self.transport.size, merge=self.merge)[0]

        return call.cache.answer((merge_seconds, self.transport.size, self.merge), choose)

    def _step(
        self, event: NewTokens, rank: int, layer: int, q: Tensor, new: tuple[Tensor, ...], groups: RowGroups,
        merge: str, call: CompiledCall, chosen: Chooser | Tensor | None,
    ) -> Program[tuple[Tensor, Tensor]]:  # fmt: skip
        """A rank's part of a step."""
        holdings, store = self._holdings[self.patterns[layer]], self._stores[rank - self._ranks[0]][layer]
        held, chooser = store.blocks[-1].count, chosen if isinstance(chosen, Chooser) else None
        if chooser is not None:
            store.index = store.index or LayerStore(self.page)
        for shard in event.shards if holdings.copies else event.shards[rank : rank + 1]:
            for run in shard:
                part = slice(run.start - event.new.start, run.stop - event.new.start)
                index = None if chooser is None else chooser.keys[:, :, part]
                store.append(*of_both(lambda x, part=part: x[:, :, part], *new), index)  # type: ignore[misc]
        if chosen is None:
            out, lse = attend(q, event.new, store, holdings, rank, groups, call)
        else:
            runs = [tuple(run for block in blocks for run in block) for blocks in holdings.held]
            find = partial(find_seen, groups, (event.new,), runs[rank], self._heads, len(q), call.device)
            slots, seen = holdings.once((find_seen, rank), lambda: (list_slots(runs[rank], call.device), find()))
            if chooser is not None:
                tag, counts = self._tags(event, layer, index=True).of(0), [sum(map(len, x)) for x in runs]
                label = f"step of layer {layer}, candidates"
                yield from join_candidates(rank, counts, chooser, store, slots, seen, tag, label)
            marks = chosen.chosen if isinstance(chosen, Chooser) else chosen
            out, lse = attend_chosen(q, marks, slots, seen, store, call)
        if not holdings.copies:
            tags = self._tags(event, layer)
            label = f"step of layer {layer}, partials"
            out, lse = yield from merge_ranks(rank, self.transport.size, out, lse, merge, tags, label)
            if event.call is not None and self._ring is not None and lse.isnan().any():
                try:
                    with Exchange(self._ring, "step"):  # perhaps a rank declines
                        pass
                except Mismatch:
                    store.blocks[-1].keep((range(held),) if held else (), self.page)
                    event.todo.add(layer)
                    raise
        store.trim(holdings.kept, rank)
        return out, lse

    def _share(self, event: NewTokens, rank: int, layer: int, k: Tensor, v: Tensor) -> Program[None]:
        """End a chunk: in a layer with copies, all ranks get the rows that later queries see."""
        holdings, store = self._holdings[self.patterns[layer]], self._stores[rank - self._ranks[0]][layer]
        if holdings.copies and holdings.needed is not None:
            width, local = k.shape[3], [split(shard, holdings.needed)[1] for shard in event.shards]
            rows = self._rounded(k) if v is k else torch.cat((self._rounded(k), self._rounded(v)), 3)
            mine = rows[:, :, [row for run in local[rank] for row in run]]
            counts = [sum(map(len, runs)) for runs in local]
            label = f"prefill of layer {layer}, rows of its window"
            x = yield from gather_rows(rank, counts, mine, self._tags(event, layer).of(0), label)
            store.append(*((x, x) if v is k else (x[..., :width], x[..., width:])))
        store.trim(holdings.kept, rank)

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else as_dtype(x, self.dtype)

    # Events.

    def _read(
        self, layer: int, q: Tensor, k: Any, v: Tensor | None, sinks: Tensor | None, options: Any, chosen: Any
    ) -> tuple[Tensor, Any, Any, CompiledCall]:
        """The tensors and their `CompiledCall`; v is k if it was not given, and None for Rows.

        Raises InvalidInput if they do not fit this cache.
        """
        if not 0 <= layer < len(self.patterns):
            raise InvalidInput(
                f"layer={layer}: the cache has {plural(len(self.patterns), 'layer')}, which count from 0"
            )
        once = v is None
        if isinstance(k, Rows) and len(k.tensors) != 1:
            raise InvalidInput(f"a cache holds Rows of one tensor, got {len(k.tensors)}; join them by torch.cat")
        q, k, v = cast_inputs(q, k, v)
        v = k if once and not isinstance(k, Rows) else v
        if chosen is not None and self.windows == "copy":
            raise Unsupported("windows='copy' takes no chosen keys; make the cache with windows='shard'")
        marks = chosen.chosen if isinstance(chosen, Chooser) else chosen
        call = compile_call(q, k, v, self.patterns[layer], "contiguous", options, sinks=sinks, chosen=marks)
        check_chooser(chosen, q, self._stores[0][layer], self._event.new.start if self._event else self.length)
        call.kernel.single()
        if call.requires_grad:
            raise Unsupported("a cache has no gradients; call it under torch.no_grad()")
        if self._ring is not None:
            self._ring.check(call.device)
        if not self._heads:
            self._slotted = {x: SlottedPattern.of(x, q.shape[1], self.max_tokens) for x in self.patterns}
        batch, heads = len(self.lengths), self._heads
        if heads and (q.shape[0], q.shape[1]) != (batch, heads):
            has = f"a batch of {batch} and {heads} query heads"
            raise InvalidInput(
                f"q {tuple(q.shape)}: the cache has {has}; change the batch with fork(rows), or empty the cache with "
                "crop(-length)"
            )
        if held := self._stores[0][layer].like:
            given = (k.tensors * 2) if isinstance(k, Rows) else (k, v)
            new, old = ([(*x.shape[1::2], x.dtype, x.device.type) for x in pair] for pair in (given, held))
            new = [(heads, dim, self.dtype or dtype, device) for heads, dim, dtype, device in new]
            if new != old:
                raise InvalidInput(
                    f"k and v have (heads, dim, dtype, device) {new}, the cache holds {old}; KVCache(dtype=...) stores "
                    "all in one dtype"
                )
        if isinstance(k, Rows):
            return q, k.replaced([as_dtype(self._rounded(x), q.dtype) for x in k.tensors], k.weights), None, call
        return q, *of_both(lambda x: as_dtype(self._rounded(x), q.dtype), k, v), call

    def _begin(self, kind: str, call: CompiledCall, note: str, chosen: Any) -> NewTokens:
        """Begin a chunk or a step, after all ranks have agreed on it. Collective."""
        size, first = self.transport.size, self.length
        layout, padding = self._chunk if kind == "prefill" and self._chunk is not None else (None, None)
        tokens = call.rows if layout is None else layout.tokens
        self._count += 1
        number = self._agree(kind, tokens, padding, call, note, chosen)
        new = range(first, first + tokens)
        if layout is not None:
            shards = tuple(tuple(shift_range(r, first) for r in layout.shard(rank)) for rank in range(size))
        else:
            owned: list[list[range]] = [[] for _ in range(size)]
            for p in range(first // self.page, new[-1] // self.page + 1):
                owned[p % size].append(clip(new, p * self.page, (p + 1) * self.page - 1))
            shards = tuple(map(tuple, owned))
        if not self._heads:
            batch, self._heads = call.sizes["batch"], call.sizes["heads"]
            self.lengths, self._shifts = [0] * batch, [()] * batch
        for row, length in enumerate(self.lengths):
            runs = (new,) if padding is None else find_runs(~padding[row].cpu().numpy(), first)
            self.lengths[row], self._shifts[row] = add_tokens(self._shifts[row], length, new, runs)
        last = None if self.max_tokens is None else self.max_tokens + new.stop - min(self.lengths, default=0)
        due, floor = kind == "prefill" or first // self.page != new.stop // self.page, max(new.stop - self.page, 0)
        for pattern in dict.fromkeys(self.patterns):
            if pattern not in self._holdings:
                copies = self.windows == "copy" and size > 1 and self._slotted[pattern].is_bounded
                self._holdings[pattern] = Holdings(size, copies=copies)
            needed = self._slotted[pattern].find_needed(self._shifts, floor, last, new.stop) if due else None
            self._holdings[pattern].begin(shards, needed, floor, self.page, prompt=kind == "prefill")
        self.length, self._chunk = new.stop, None
        ring = self._ring if kind == "step" and call.device.type == "cpu" else None
        first_call = None if ring is None or ring.defers(call.options.check) else call
        self._event = NewTokens(kind, new, shards, layout, set(range(len(self.patterns))), number, first_call)
        return self._event

    def _check_event(self, kind: str, layer: int | None = None, tokens: int | None = None) -> None:
        """Raise InvalidInput for a call that does not belong to the chunk or step that has begun."""
        event = self._event
        if event and (kind != event.kind or layer not in event.todo or tokens not in (None, len(event.new))):
            raise InvalidInput(
                f"{kind}{'' if layer is None else f' of layer {layer}'} within a {event.kind} of "
                f"{plural(len(event.new), 'token')}: layers {sorted(event.todo)} have not been called yet; call each "
                "once, or make a new cache after an error"
            )

    def _end(self, result: Any) -> Any:
        """Return the result of a layer; the last layer ends the chunk or step."""
        assert self._event is not None
        if not self._event.todo:
            self._event = None
            for holdings in self._holdings.values():
                holdings.settle()
        return result

    def _agree(self, kind: str, tokens: int, padding: Tensor | None, call: CompiledCall, note: str, chosen: Any) -> int:
        """The number of the event. Raises Mismatch on every rank if caches or tokens differ."""
        transport = self._ring
        if transport is None:
            return self._count << TAG_BITS
        options = {name: getattr(call.options, name) for name in ("kernel", "scale", "softcap", "deterministic")}
        record = {
            "cache": self._spelled,
            "layers": len(self.patterns),
            "length": self.length,
            "crops and forks": self._history.hex(),
            "new tokens": tokens,
            "padding": None if padding is None else digest(padding.cpu().numpy().tobytes()).hex(),
            "the tokens of this step (by digests, or note=)": note if len(note) < 1024 else digest(note.encode()).hex(),
            "sinks": call.sinks,
            "chosen keys": call.chosen and "groups {}, k {}, block {}".format(*call.chosen),
            "keys of its Chooser": isinstance(chosen, Chooser) and f"{chosen.keys.shape[3]} of {chosen.keys.dtype}",
            **call.sizes,
            **options,
        }
        if transport.defers(call.options.check):
            return transport.announce(json.dumps({"stage": kind, **record}).encode())
        mine = json.dumps(record).encode()
        with Exchange(transport, kind, FINGERPRINT_BYTES) as exchanged:
            exchanged.mine = digest(mine)
        if len({*exchanged.records}) > 1:
            with Exchange(transport, "arguments", LIMIT) as arguments:
                arguments.mine = mine
            compare_records(arguments.records)
        return transport.events << TAG_BITS

    def _report(self, stage: str, *, deferred: bool, check: str | None = None) -> AbstractContextManager[Any]:
        """A context that reports an exception to the other ranks."""
        if self._ring is None:
            return nullcontext()
        return ErrorReport(self._ring, stage, deferred=deferred or self._ring.defers(check), once=True)

    def _refusing(self, kind: str, layer: int, check: str | None, *, ends: bool = False) -> AbstractContextManager[Any]:
        """A context for the checks of a call: all ranks are told why this one refuses it, before its first message.

        ends: an error in a later layer ends the calls of the group.
        """
        event = self._event
        if event is None or event.kind == "prefill":  # the others are in the handshake of the cache or of attention
            return self._report("call" if event else kind, deferred=False, check=check)
        layer = next((x for x in event.todo if x == layer), min(event.todo, default=0))
        if ends or event.call is None or self._holdings[self.patterns[layer]].copies:
            return self._report(kind, deferred=True)
        stack = ExitStack()
        stack.enter_context(self._report(kind, deferred=False))
        stack.push(partial(self._decline, event, layer, event.call))
        return stack

    def _decline(self, event: NewTokens, layer: int, call: CompiledCall, *raised: object) -> None:
        """After an error, send NaN in the messages of a layer: ranks that get NaN exchange records, with the error."""
        if raised[1] is not None:
            held, sizes = self._stores[0][layer].like, call.sizes
            shape = sizes["batch"], sizes["heads"], len(event.new), held[1].shape[3] if held else sizes["value_dim"]
            out = torch.full(shape, torch.nan, dtype=wide(getattr(torch, sizes["dtype"])), device=call.device)
            tags = self._tags(event, layer)
            merged = self._ranks[0], self.transport.size, out, out[..., 0], self._choose_merge(call), tags, "declined"
            with self._report("step", deferred=True):
                run_programs([merge_ranks(*merged)], self.transport)

    def _layers(self, pattern: Pattern) -> list[int]:
        return [layer for layer, of_layer in enumerate(self.patterns) if of_layer == pattern]

    def _check_room(self, tokens: int) -> None:
        most = max(self.lengths, default=0)
        if self.max_tokens is not None and self._event is None and most + tokens > self.max_tokens:
            raise InvalidInput(
                f"{plural(tokens, 'new token')} after {most:,}: the cache has max_tokens={self.max_tokens:,}; make it "
                "with a larger one"
            )

    def _note(self, *change: object) -> None:
        """Note a change that is not collective for the next record, and discard a chunk that was begun."""
        self._chunk = None
        self._history = digest(self._history + repr(change).encode())


def _whole_numbers(name: str, values: Any) -> list[int]:
    """The values as integers. Raises InvalidInput."""
    values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    if isinstance(values, Sequence) and all(
        isinstance(x, int | np.integer) and not isinstance(x, bool) for x in values
    ):
        return [*map(int, values)]
    raise InvalidInput(f"{name}({values!r}): give a whole number for each row")
