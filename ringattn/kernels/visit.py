"""A kernel for any mask, in one launch a visit: Triton kernels that read the mask from tables, see `kernels.tables`.

Nothing is compiled for a mask: masks are data. Ready visits of several virtual ranks on one device are one launch.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Unsupported
from ..plan.steps import Part
from ..plan.visit import Visit
from ..plan.work import Work
from ..transport.base import Compute
from . import merges
from .centre import Centre
from .contract import CallData, KernelPass, OpChoice, Pair, QueryRows, Tensors, VisitKernel
from .dropout import BITS, key_steps, row_streams
from .memory import as_dtype, empty, empty_rows, wide
from .pad import EXTRA, delta, times_unit
from .softmax import begin_sums, merge_sinks_
from .tables import FRESH, LAST, Side, VisitTable, find_steps

#: The largest head dim.
WIDEST = 256
LOG2E = 1.4426950408889634
#: ptxas before this can silently corrupt matrix products of compute capability 9.0 (triton issues 9433 and 11781).
SAFE_PTXAS = (13, 3)


@dataclass(frozen=True)
class Config:
    """How a kernel is compiled: rows of a step of the other side, warps, and stages of the software pipeline."""

    step: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The rows of a tile on both sides, and the kernels' configurations."""

    block: int
    forward: Config
    dq: Config
    dkv: Config


def choose_tiles(dtype: torch.dtype, width: int, capability: tuple[int, int]) -> Tiles:
    """The tiles for the wider of both head dims, which `scripts/kernels` has compiled without spills in loops.

    Compute capabilities 9.0 and 10.x have matrix units that read from shared memory, of which they have 227 KiB; the
    others hold operands in registers, and some have 99 KiB.
    """
    large = capability[0] in (9, 10)
    if dtype == torch.float32:
        config = Config(16, 4, 1)
        return Tiles(32, config, config, config)
    if width > 128:
        backward = Config(32, 8, 2 if large else 1)
        return Tiles(64, Config(32, 8, 2), backward, backward)
    of_queries = Config(64, 4 if capability[0] == 10 else 8, 3)
    if width > 64:
        if large:
            return Tiles(128, Config(64, 8, 3), of_queries, Config(64, 8, 2))
        return Tiles(128, Config(64, 8, 2), Config(32, 8, 2), Config(16, 8, 2))
    if large:
        return Tiles(128, Config(64, 4, 3), of_queries, Config(64, 8, 3))
    return Tiles(128, Config(64, 4, 3), Config(64, 8, 2), Config(64, 8, 2))


@dataclass(frozen=True, eq=False)
class VisitTables:
    """What a visit needs: a table for the forward, or one for dq and one for dk and dv, and their programs.

    `merges`: some row of the forward gets a result from several visits, so that sums must be kept in fp32.
    """

    host: tuple[np.ndarray, ...]
    merges: bool
    _devices: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict)

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tables on a device; they are uploaded once."""
        if device not in self._devices:
            self._devices[device] = tuple(torch.from_numpy(x).to(device) for x in self.host)
        return self._devices[device]

    @property
    def programs(self) -> tuple[int, ...]:
        return tuple(int(x[0]) for x in self.host)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.host)


class VisitTriton(VisitKernel):
    """softmax(scale * q k^T) v for any mask, in one launch a visit, by Triton kernels for CUDA.

    fp16, bf16 and fp32 (products never in TF32); head dims up to 256, also different ones of k and v; softcap and
    dropout. All sums are in fp32, lse is merged in fp64. Deterministic: every row has one owner.
    """

    name = "visit"
    features = ("softcap", "dropout", "reproducible")
    max_head_dim = WIDEST + EXTRA  # extra columns are not computed, see `VisitPass`
    tiles = choose_tiles(torch.bfloat16, 128, (9, 0))
    #: For dropout in calls of leaves, see `calls.Kernel.numbers`; else positions of the rank decide.
    numbers: tuple[Tensor, Tensor] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return type(self), self.tiles.block, *self.asked

    @classmethod
    def missing(cls) -> str | None:
        if (reason := merges.missing()) or _triton().INTERPRETED:
            return reason
        if not torch.cuda.is_available():
            return "torch.cuda.is_available() is False: no CUDA device or a CPU build"
        return device_refuses(torch.cuda.get_device_capability())

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        interpreted = merges.missing() is None and _triton().INTERPRETED.value
        if q.device.type != "cuda" and not interpreted:
            raise Unsupported(f"kernel {self.name} needs tensors on a cuda device, got {q.device}; try kernel=auto")
        if reason := self.missing():
            raise Unsupported(f"kernel {self.name}: {reason}; try kernel=auto")
        if q.dtype == torch.float64:
            raise Unsupported(f"kernel {self.name} does not compute float64; try kernel=reference")
        width = max(q.shape[-1], v.shape[-1])
        if width > self.max_head_dim:
            raise Unsupported(f"kernel {self.name} takes head dims up to {WIDEST}, got {width}; try kernel=reference")
        if not interpreted:
            width = min(width, WIDEST)
            self.tiles = choose_tiles(q.dtype, width, torch.cuda.get_device_capability(q.device))
            if reason := self_test(q.device, q.dtype, width, self.tiles):
                raise Unsupported(f"kernel {self.name}: {reason}; try kernel=aten_cuda")

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        return OpChoice((("one launch a visit", 1),))

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        """The tables of each visit, and how many there are. Every row that stays has a program in some visit."""
        keys_stay = any(visit.keys_stay for visit in visits)
        own = Side(kv_heads if keys_stay else heads, rows, self.tiles.block)
        by_side: list[list[np.ndarray]] = []
        merges = [not backward and keys_stay] * len(visits)
        for by_key in (False, True) if backward else (False,):
            if by_key == keys_stay:
                packed, shared = _pack_staying([visit.works for visit in visits], own, by_key=by_key)
                merges = [not backward and some for some in shared]
            else:
                packed = [_pack_visiting(visit, self.tiles.block, by_key=by_key) for visit in visits]
            by_side.append(packed)
        return [VisitTables(tuple(x), some) for *x, some in zip(*by_side, merges, strict=True)], len(visits)

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return VisitPass(self, call, q, block)


def _pack_staying(visits: Sequence[Sequence[Work]], own: Side, *, by_key: bool) -> tuple[list[np.ndarray], list[bool]]:
    """The tables of what stays in a pass, and which of them have programs for rows that several visits change."""
    steps = find_steps(visits, own.heads, by_key=by_key)
    tables = [VisitTable(works, own, steps, by_key=by_key) for works in visits]
    flags = [[np.zeros(own.starts(step)[-1], np.int64) for step in steps] for _ in tables]
    fill = [[np.zeros(0, np.int64)] * own.heads for _ in tables]
    for order, flag in ((range(len(tables)), FRESH), (range(len(tables) - 1, -1, -1), LAST)):
        for head, step in enumerate(steps):
            seen = np.zeros(own.starts(step)[-1], bool)
            for visit in order:
                touched = tables[visit].heads[head][0].touched
                flags[visit][head][touched] += np.where(seen[touched], 0, flag)
                seen[touched] = True
            if flag == FRESH and tables:  # the first visit writes the rows that no visit has
                fill[0][head] = np.flatnonzero(~seen)
    for head, untouched in enumerate(fill[0] if tables else ()):
        flags[0][head][untouched] = FRESH | LAST
    shared = [
        any((of[table.heads[head][0].touched] != FRESH | LAST).any() for head, of in enumerate(of_visit))
        for table, of_visit in zip(tables, flags, strict=True)
    ]
    return [table.pack(*x) for table, *x in zip(tables, flags, fill, strict=True)], shared


def _pack_visiting(visit: Visit, block: int, *, by_key: bool) -> np.ndarray:
    """The table of the rows that visit: all of them, if the visit begins their sums."""
    own = Side(*visit.shape, block)
    steps = find_steps([visit.works], own.heads, by_key=by_key)
    table = VisitTable(visit.works, own, steps, by_key=by_key)
    tiles = [np.arange(own.starts(step)[-1]) for step in steps]
    rest = [x if visit.first else x[:0] for x in tiles]
    fill = [np.setdiff1d(x, walk.touched) for x, (walk, _) in zip(rest, table.heads, strict=True)]
    return table.pack([np.full(len(x), FRESH if visit.first else 0) for x in tiles], fill)


@dataclass(eq=False)
class Sums:
    """The sums of the queries that stay in a forward: the output, lse in fp64, and sums in fp32 once some are kept."""

    out: Tensor
    lse: Tensor
    total: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """(total, lse, out). Without a total, no program reads or writes it."""
        return self.out if self.total is None else self.total, self.lse, self.out


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel, by its name, for a visit of one rank: tensors [B, H, n, ...], in the kernel's order."""

    name: str
    table: Tensor
    programs: int
    tensors: tuple[Tensor | None, ...]


class VisitPass(KernelPass):
    """One pass of `VisitTriton`. The columns of q and k that flag padded keys take no part in the products."""

    together = True

    def __init__(self, kernel: VisitTriton, call: CallData, q: Tensor, block: Tensors) -> None:
        self.kernel, self.call, self.q, self.block = kernel, call, q, block
        sizes = q.shape[0], q.shape[-1], block[1].shape[-1]
        self.key = kernel.key, kernel.softcap, kernel.dropout, call.scale, q.dtype, q.device, sizes
        self.centre = Centre(kernel, q, block[0], call.scale)
        self.first = EXTRA if kernel.padded else 0
        #: What all visits of a backward read of queries that stay; in any backward, of the last visit.
        self._rows: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None

    def new_sums(self, out: Tensor | None) -> Sums:
        if out is None:
            out = empty_rows((*self.q.shape[:3], self.block[1].shape[-1]), self.q.dtype, self.q.device)
        return Sums(out, empty_rows(self.q.shape[:3], torch.float64, self.q.device))

    def finish(self, sums: Sums) -> Pair:
        if not self.call.prepared:  # no visit has written them
            begin_sums(sums.out, sums.lse)
        if self.call.sinks is not None:
            merge_sinks_(sums.out, sums.lse, self.call.sinks)
        return sums.out, as_dtype(sums.lse, wide(self.q.dtype))

    def new_grads(self) -> Tensors:
        stays = self.block if self.call.stays.kind == "kv" else (self.q,)
        grads = tuple(empty(x.shape, torch.float32, x.device) for x in stays)
        if self.kernel.padded:
            grads[0][..., :EXTRA] = 0.0
        return grads

    def finish_grads(self, grads: Tensors) -> Tensors:
        if not self.call.prepared:  # no visit has written them
            for x in grads:
                x.zero_()
        return grads

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        self.launch([Compute(self, visit, (q, block, sums), False, "")])

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: Any, travel: Tensors) -> None:
        self.launch([Compute(self, visit, (rows, block, stay, travel), True, "")])

    def launch(self, requests: Sequence[Compute]) -> None:
        groups: dict[object, list[KernelLaunch]] = defaultdict(list)
        for request in requests:
            one: VisitPass = request.kernel
            make = one._backward if request.backward else one._forward
            for launch in make(request.visit, *request.tensors):
                alike = [None if x is None else (x.dtype, x.stride(2)) for x in launch.tensors]
                groups[launch.name, *alike].append(launch)
        for group in groups.values():
            self._run(group)

    def _forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> list[KernelLaunch]:
        table: VisitTables = visit.table
        if isinstance(sums, Sums):
            if table.merges and sums.total is None:
                same = sums.out.dtype == torch.float32
                sums.total = sums.out if same else empty_rows(sums.out.shape, torch.float32, q.device)
            totals = sums.tensors
        else:
            totals = *sums, sums[0]
        of_queries, of_keys = self._row_sets(visit)
        (q, *shifts), (k, v) = self.centre.queries(q, of_queries), block
        shift = shifts[0] if shifts else None
        tensors = *self._inputs(q, k, v, of_keys), *totals, shift, *self._numbers(visit)
        return self._launches(visit, ("forward", tensors))

    def _backward(
        self, visit: Visit, rows: QueryRows, block: Tensors, stay: Tensors, travel: Tensors
    ) -> list[KernelLaunch]:
        of_queries, of_keys = self._row_sets(visit)
        if visit.first and self.kernel.padded:
            travel[0][..., : self.first] = 0.0  # no program writes these columns
        (dq,), (dk, dv) = (travel, stay) if visit.keys_stay else (stay, travel)
        if self._rows is None or visit.keys_stay:
            lse, *keys = self.centre.rows(rows.q, rows.lse, of_queries)
            # Contiguous, so that strides do not keep ranks from sharing a launch.
            lse2 = (lse.double() * LOG2E).float().contiguous()
            key = _with_columns(keys[0][:, :, :1, self.first :]) if keys else None
            self._rows = _with_columns(as_dtype(rows.grad, rows.q.dtype)), lse2, self._delta(rows), key
        grad, lse2, number, key = self._rows
        k, v = block
        q, k, v = self._inputs(rows.q, k, v, of_keys)
        read, numbers = (q, k, v, grad, lse2, number), self._numbers(visit)
        dq, dk = dq[..., self.first :], dk[..., self.first :]
        return self._launches(visit, ("dq", (*read, dq, key, *numbers)), ("dkv", (*read, dk, dv, *numbers)))

    def _launches(self, visit: Visit, *named: tuple[str, tuple[Tensor | None, ...]]) -> list[KernelLaunch]:
        table: VisitTables = visit.table
        device = self.q.device
        return [
            KernelLaunch(name, on_device, programs, tensors)
            for (name, tensors), on_device, programs in zip(named, table.on(device), table.programs, strict=True)
            if programs and len(self.q)
        ]

    def _row_sets(self, visit: Visit) -> tuple[Any, Any]:
        """Which rows of which heads the tensors of queries, and of keys, have."""
        both = self.call.stays.row_set, visit.part.row_set
        return both[::-1] if visit.keys_stay else both

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor, of_keys: Any) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as the kernels read them: keys minus the centre, columns one after another."""
        q, k, v = map(_with_columns, (q, self.centre.keys(k, of_keys), v))
        return q[..., self.first :], k[..., self.first :], v

    def _delta(self, rows: QueryRows) -> Tensor:
        if rows.number is None:
            assert rows.out is not None
            return delta(rows.grad, rows.out, rows.grad_lse)
        if self.call.number == "factor":
            grad = as_dtype(rows.grad, torch.float32)  # not rounded on the way
            return delta(grad, times_unit(grad, rows.number), None)
        return rows.number

    def _numbers(self, visit: Visit) -> tuple[Tensor | None, Tensor | None]:
        """The streams of the query rows and the steps of the keys, with which dropout draws; (None, None) without."""
        dropout, call = self.kernel.dropout, self.call
        if dropout is None or self.kernel.numbers is not None:
            return self.kernel.numbers or (None, None)
        assert dropout.seed is not None
        queries, keys = (visit.part, call.stays) if visit.keys_stay else (call.stays, visit.part)
        (heads, rows), (kv_heads, columns) = call.places(queries), call.places(keys)
        batch = len(self.q)
        streams = row_streams(dropout.seed, batch, heads + call.heads.start, rows)
        return streams, key_steps(columns).expand(batch, len(kv_heads), -1).unsqueeze(-1)

    def _run(self, launches: list[KernelLaunch]) -> None:
        """Launch a kernel once, for one or several ranks whose tensors have equal dtypes and strides of rows."""
        kernel, triton = self.kernel, _triton()
        q, k, v, *_ = launches[0].tensors
        assert q is not None and k is not None and v is not None
        name, many = launches[0].name, len(launches) > 1
        config: Config = getattr(kernel.tiles, name)
        dim, value_dim, scale = q.shape[-1], v.shape[-1], self.call.scale
        cap, dropout = kernel.softcap, kernel.dropout
        places, divisor = _places(launches) if many else (None, 0)
        strides = [n for x in launches[0].tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]
        numbers = {
            "last_row": q.shape[2] - 1,
            "last_key": k.shape[2] - 1,
            **({} if name == "forward" else {"scale": scale}),
            "scale2": scale * LOG2E,
            "ratio": 0.0 if cap is None else 2 * scale / cap * LOG2E,
            "softcap2": 0.0 if cap is None else cap * LOG2E,
            "least": 0 if dropout is None else round(dropout.p * (1 << BITS)),
            "keep": 1.0 if dropout is None else 1 / (1 - dropout.p),
        }
        grid = (max(x.programs for x in launches), len(q), len(launches))
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():  # Triton launches on the current device
            getattr(triton, f"{name}_kernel")[grid](
                *launches[0].tensors,
                *strides,
                launches[0].table,
                places,
                **numbers,
                BN=config.step,
                BLOCK=kernel.tiles.block,
                D=dim,
                DP=_power(dim),
                DV=value_dim,
                DVP=_power(value_dim),
                HIDDEN=kernel.padded,
                CAP=cap is not None,
                MANY=divisor,
                STAGES=config.stages,
                num_warps=config.warps,
                num_stages=config.stages,
            )


def _places(launches: Sequence[KernelLaunch]) -> tuple[Tensor, int]:
    """What differs between the ranks of one launch, as the kernels read it, and a divisor of the wide tensors'."""
    base, lines, divisor = launches[0], [], EXTRA
    columns = _triton().MANY_COLUMNS.value
    for launch in launches:
        q, k, *_ = launch.tensors
        assert q is not None and k is not None
        line = [_offset(launch.table, base.table), q.shape[2] - 1, k.shape[2] - 1]
        for x, first in zip(launch.tensors, base.tensors, strict=True):
            place = [0, 0, 0] if x is None or first is None else [_offset(x, first), *x.stride()[:2]]
            if x is not None and x.dtype.itemsize <= 4 and any(n % EXTRA for n in place):
                divisor = 1
            line += place
        lines.append(line + [0] * (columns - len(line)))
    host = torch.tensor(lines, dtype=torch.int64, device="cpu")
    device = base.table.device
    return (host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host), divisor


def _with_columns(x: Tensor) -> Tensor:
    """x with its columns one after another in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _offset(x: Tensor, base: Tensor) -> int:
    """The distance of two tensors in memory, in elements."""
    elements, rest = divmod(x.data_ptr() - base.data_ptr(), x.element_size())
    assert not rest, "tensors are aligned to their elements"
    return elements


def _power(width: int) -> int:
    """The columns of a tile: a power of two, and at least what a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def _triton() -> ModuleType:
    return import_module(".visit_triton", __package__)


#: The largest error of `self_test`, relative to the largest number: several times what rounding makes.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@cache
def self_test(device: torch.device, dtype: torch.dtype, width: int, tiles: Tiles) -> str | None:
    """Why a device must not use these kernels: they differ from plain torch on some tiles. None if they agree.

    Forward and backward of a causal window over two visits, of which the second merges and adds.
    """
    rows, window = 5 * tiles.block // 2, 2 * tiles.block - 3
    generator = torch.Generator(device.type if device.type == "cuda" else "cpu").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, rows, width, dtype=torch.float32, generator=generator, device=device).to(dtype)
        for heads in (2, 1, 1, 2)
    )
    scale, cut = width**-0.5, rows // 2
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(rows, device=device)
    visible = (distance >= 0) & (distance <= window)
    exact = [x.double() for x in (q, k, v, grad)]
    weights = ((exact[0] @ exact[1].mT) * scale).masked_fill(~visible, -torch.inf).softmax(-1)
    out = weights @ exact[2]
    dp = exact[3] @ exact[2].mT
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
    truth = out, ds @ exact[1], (ds.mT @ exact[0]).sum(1, keepdim=True), (weights.mT @ exact[3]).sum(1, keepdim=True)

    kernel = VisitTriton().derive(tiles=tiles)
    call = CallData(scale, Part("q", 0), range(2), lambda part: (q, q))
    parts = [slice(0, cut), slice(cut, rows)]
    visits = [
        Visit(Part("kv", i), tile_works(rows, at, window), (1, at.stop - at.start), True) for i, at in enumerate(parts)
    ]
    blocks = [(k[:, :, at], v[:, :, at]) for at in parts]
    found: list[Tensor] = []
    for backward in (False, True):
        tables, prepared = kernel.prepare(visits, 2, 1, rows, backward=backward)
        one = kernel.begin(replace(call, prepared=prepared), q, blocks[0])
        if not backward:
            sums = one.new_sums(None)
            for visit, table, block in zip(visits, tables, blocks, strict=True):
                one.visit_forward(replace(visit, table=table), q, block, sums)
            result, lse = one.finish(sums)
            found.append(result)
        else:
            stay, given = one.new_grads(), QueryRows(grad, q, lse, out=found[0])
            travel = torch.empty_like(k, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
            for visit, table, block, at in zip(visits, tables, blocks, parts, strict=True):
                of_block = travel[0][:, :, at], travel[1][:, :, at]
                one.visit_backward(replace(visit, table=table), given, block, stay, of_block)
            found += [*one.finish_grads(stay), *travel]
    for name, x, true in zip(("out", "dq", "dk", "dv"), found, truth, strict=True):
        error = float((x.double() - true).abs().max() / true.abs().max())
        if not error <= TOLERANCE[dtype]:  # also if it is NaN
            return f"its self-test on {device} found {name} off by {error:.0e} of its largest number"
    return None


def tile_works(rows: int, keys: slice, window: int) -> list[Work]:
    """The works of a causal window between all rows and a run of keys, for `self_test`."""
    first, last = keys.start, min(keys.stop + window, rows)
    count = keys.stop - keys.start
    return [Work(range(2), range(1), range(first, last), (range(count),), 0, window)]


@cache
def device_refuses(capability: tuple[int, int]) -> str | None:
    """Why these kernels do not run on a device; None if they do."""
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this device has {capability[0]}.{capability[1]}"
    if capability[0] == 9 and (version := ptxas_version()) < SAFE_PTXAS:
        return (
            f"ptxas {version[0]}.{version[1]} can silently corrupt matrix products on compute capability 9.0; set "
            f"TRITON_PTXAS_PATH to ptxas {SAFE_PTXAS[0]}.{SAFE_PTXAS[1]} or newer, or install Triton 3.9 or newer"
        )
    return None


@cache
def ptxas_version() -> tuple[int, int]:
    """The version of the ptxas with which Triton compiles for compute capability 8.0 to 9.0."""
    path = import_module("triton").knobs.nvidia.ptxas.path
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    assert found is not None, f"ptxas --version printed no release: {text!r}"
    return int(found[1]), int(found[2])
