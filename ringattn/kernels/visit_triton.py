"""Triton kernels that compute a visit in one launch, its mask read from the tables of `kernels.tables`.

Imports Triton, so import this module only where Triton runs. Each tensor is [B, H, n, ...], given by a pointer and the
strides of its batch, heads and rows. With `places`, a launch serves several ranks: `places` [ranks, columns] holds what
differs, as offsets and strides in elements, see `kernels.visit.launch`; MANY is a divisor of those of wide tensors.

Logits are in base 2. lse is natural, in fp64, because every rounding of lse changes the probabilities of the backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .pad import EXTRA
from .tables import ENTRY, FRESH, HEADER, LAST, RECORD

#: Whether Triton interprets kernels, which then run on CPU tensors.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
#: Columns in front of q and k that mark padded keys, see `pad.hide_keys`.
FLAGS = tl.constexpr(EXTRA)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
#: Columns of `places`: the offset of the table, the last rows of queries and keys, and three of each tensor.
MANY_COLUMNS = tl.constexpr(33)
_HEADER, _RECORD, _ENTRY = tl.constexpr(HEADER), tl.constexpr(RECORD), tl.constexpr(ENTRY)
_FRESH, _LAST = tl.constexpr(FRESH), tl.constexpr(LAST)


@triton.jit
def _dot(a, b):
    """a @ b in fp32, never TF32. The interpreter multiplies the bits of bf16 (triton issue 11584), so widen there."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _dot_add(a, b, c):
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _at(x, places, number: tl.constexpr, MANY: tl.constexpr, b, head, x_b, x_h):
    """The first row of a head of tensor `number`."""
    if MANY:
        places += tl.program_id(2) * MANY_COLUMNS + 3 + 3 * number
        offset, x_b, x_h = tl.load(places), tl.load(places + 1), tl.load(places + 2)
        if x.dtype.element_ty.primitive_bitwidth <= 32:
            offset, x_b, x_h = tl.multiple_of(offset, MANY), tl.multiple_of(x_b, MANY), tl.multiple_of(x_h, MANY)
        x += offset
    return x + b * x_b + head * x_h


@triton.jit
def _rank(table, places, last_row, last_key, MANY: tl.constexpr):
    """(table, last row of queries, last row of keys) of the rank of this program."""
    if MANY:
        places += tl.program_id(2) * MANY_COLUMNS
        table += tl.load(places)
        last_row, last_key = tl.load(places + 1).to(tl.int32), tl.load(places + 2).to(tl.int32)
    return table, last_row, last_key


@triton.jit
def _program(table, last, BLOCK: tl.constexpr):
    """(batch, head, rows, which are inside, flags, first segment, segments, entries, bounds) of this program."""
    program = table + _HEADER + tl.program_id(0) * _RECORD
    inside = tl.arange(0, BLOCK) < tl.load(program + 3)
    row = tl.minimum(tl.load(program + 1) + tl.arange(0, BLOCK) * tl.load(program + 2), last).to(tl.int64)
    segments = table + tl.load(table + 1) + _RECORD * tl.load(program + 4)
    return (
        tl.program_id(1).to(tl.int64), tl.load(program).to(tl.int64), row, inside, tl.load(program + 6),
        segments, tl.load(program + 5), table + tl.load(table + 2), table + tl.load(table + 3),
    )  # fmt: skip


@triton.jit
def _segment(segments, entries):
    """(head of the other side, step, first entry, partial tiles, full tiles, distance) of a segment."""
    return (
        tl.load(segments).to(tl.int64), tl.load(segments + 1), entries + _ENTRY * tl.load(segments + 2),
        tl.load(segments + 3), tl.load(segments + 4), tl.load(segments + 5),
    )  # fmt: skip


@triton.jit
def _load(x, row, x_n, D: tl.constexpr, DP: tl.constexpr):
    """Rows [n, DP] of x; columns from D on are 0."""
    column = tl.arange(0, DP)
    if D == DP:
        return tl.load(x + row[:, None] * x_n + column[None, :])
    return tl.load(x + row[:, None] * x_n + column[None, :], column[None, :] < D, other=0.0)


@triton.jit
def _load_columns(x, row, x_n, D: tl.constexpr, DP: tl.constexpr):
    """The same, transposed: [DP, n]."""
    column = tl.arange(0, DP)
    if D == DP:
        return tl.load(x + row[None, :] * x_n + column[:, None])
    return tl.load(x + row[None, :] * x_n + column[:, None], column[:, None] < D, other=0.0)


@triton.jit
def _next(entries, i, distance, stride, SUB: tl.constexpr):
    """The first row of step i + 1 of a walk through tiles of SUB steps: a listed one, or at equal distances."""
    if SUB == 1:
        return tl.load(entries + tl.where(distance == 0, 2 * (i + 1), 0)) + (i + 1) * distance
    tile, part = (i + 1) // SUB, (i + 1) % SUB
    return tl.load(entries + tl.where(distance == 0, 2 * tile, 0)) + tile * distance + part * stride


@triton.jit
def _cap(s, ratio, softcap2):
    """(capped logits in base 2, their slope) of products s = q k^T."""
    t = 1.0 - 2.0 / (1.0 + tl.exp2(s * ratio))
    return t * softcap2, 1.0 - t * t


@triton.jit
def _kept(streams, steps, least):
    """Which weights dropout keeps: the numbers of `kernels.dropout.weight_factors`."""
    x = streams[:, None] + steps[None, :]
    x = (x ^ (x.to(tl.uint64, bitcast=True) >> 30).to(tl.int64, bitcast=True)) * -4658895280553007687
    x = (x ^ (x.to(tl.uint64, bitcast=True) >> 27).to(tl.int64, bitcast=True)) * -7723592293110705685
    x = x ^ (x.to(tl.uint64, bitcast=True) >> 31).to(tl.int64, bitcast=True)
    return (x.to(tl.uint64, bitcast=True) >> 33).to(tl.int64, bitcast=True) >= least


@triton.jit
def _inside(table, offset, own, other, N: tl.constexpr):
    """[own, other]: which rows of a tile of the other side the own rows see."""
    at = table + offset + 2 * own
    lo, hi = tl.load(at), tl.load(at + 1)
    return (other[None, :] >= lo[:, None]) & (other[None, :] < hi[:, None])


@triton.jit
def _walk_keys(acc, m, norm, q, k, v, k_n, v_n, stream, steps, steps_n, entries, bounds, count, step, distance,
               last_key, scale2, ratio, softcap2, least,
               BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
               DVP: tl.constexpr, MASK: tl.constexpr, HIDDEN: tl.constexpr, CAP: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """The online softmax of one tile of rows over `count` tiles of keys."""
    SUB: tl.constexpr = BLOCK // BN
    own = tl.arange(0, BLOCK)
    off = tl.arange(0, BN) * step
    k0 = tl.load(entries)
    for i in tl.range(0, count * SUB, num_stages=STAGES):
        j = k0 + off
        if MASK:
            j = tl.minimum(j, last_key)
        j = j.to(tl.int64)
        kt = _load_columns(k, j, k_n, D, DP)
        s = _dot(q, kt)
        unit = scale2
        if CAP:
            s, _ = _cap(s, ratio, softcap2)
            unit = 1.0
        if MASK:
            other = (i % SUB) * BN + tl.arange(0, BN)
            s = tl.where(_inside(bounds, tl.load(entries + 2 * (i // SUB) + 1), own, other, BN), s, float("-inf"))
        if HIDDEN:
            s = tl.where((tl.load(k - FLAGS + j * k_n) == 0.0)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1) * unit)
        safe = tl.where(new == float("-inf"), 0.0, new) if MASK or HIDDEN else new
        p = tl.exp2(s * unit - safe[:, None])
        alpha = tl.exp2(m - safe)
        norm = norm * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if steps is not None:
            p = tl.where(_kept(stream, tl.load(steps + j * steps_n), least), p, 0.0)
        vt = _load(v, j, v_n, DV, DVP)
        acc = _dot_add(p.to(vt.dtype), vt, acc)
        m = new
        k0 = _next(entries, i, distance, BN * step, SUB)
    return acc, m, norm


@triton.jit
def forward_kernel(
    q, k, v, total, lse, result, shift, streams, steps,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, total_b, total_h, total_n, lse_b, lse_h, lse_n,
    result_b, result_h, result_n, shift_b, shift_h, shift_n, streams_b, streams_h, streams_n, steps_b, steps_h, steps_n,
    table, places, last_row, last_key, scale2, ratio, softcap2, least, keep,
    BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HIDDEN: tl.constexpr, CAP: tl.constexpr, MANY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge a visit into total [.., n, DV] in fp32 and lse [.., n]; rows that are complete go to `result` instead."""
    table, last_row, last_key = _rank(table, places, last_row, last_key, MANY)
    if MANY:  # noqa: SIM102  # known when the kernel is compiled
        if tl.program_id(0) >= tl.load(table):
            return
    b, head, row, inside, flags, segments, count, entries, bounds = _program(table, last_row, BLOCK)
    qt = _load(_at(q, places, 0, MANY, b, head, q_b, q_h), row, q_n, D, DP)
    stream = row
    if streams is not None:
        stream = tl.load(_at(streams, places, 7, MANY, b, head, streams_b, streams_h) + row * streams_n)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DVP], tl.float32)
    for _ in range(count):
        other, step, here, partial, full, distance = _segment(segments, entries)
        kh = _at(k, places, 1, MANY, b, other, k_b, k_h)
        vh = _at(v, places, 2, MANY, b, other, v_b, v_h)
        sh = steps
        if steps is not None:
            sh = _at(steps, places, 8, MANY, b, other, steps_b, steps_h)
        acc, m, norm = _walk_keys(
            acc, m, norm, qt, kh, vh, k_n, v_n, stream, sh, steps_n, here, bounds, partial, step, 0, last_key, scale2,
            ratio, softcap2, least, BN, BLOCK, D, DP, DV, DVP, True, HIDDEN, CAP, STAGES)  # fmt: skip
        here += _ENTRY * partial
        acc, m, norm = _walk_keys(
            acc, m, norm, qt, kh, vh, k_n, v_n, stream, sh, steps_n, here, bounds, full, step, distance, last_key,
            scale2, ratio, softcap2, least, BN, BLOCK, D, DP, DV, DVP, False, HIDDEN, CAP, STAGES)  # fmt: skip
        segments += _RECORD
    seen = norm > 0.0
    sums = tl.where(seen, norm, 1.0)
    acc = acc * (keep / sums)[:, None]
    new = tl.where(seen, m.to(tl.float64) * LN2 + tl.log(sums.to(tl.float64)), float("-inf"))
    # A NaN among the logits is one of the row.
    new = tl.where(norm == norm, new, norm.to(tl.float64))
    if shift is not None:
        new += tl.load(_at(shift, places, 6, MANY, b, head, shift_b, shift_h) + row * shift_n)
    lse = _at(lse, places, 4, MANY, b, head, lse_b, lse_h) + row * lse_n
    column = tl.arange(0, DVP)
    stored = inside[:, None] & (column < DV)[None, :]
    where = row[:, None] * total_n + column[None, :]
    total = _at(total, places, 3, MANY, b, head, total_b, total_h)
    if (flags & _FRESH) == 0:  # merge with what earlier visits found
        old = tl.load(lse, inside, other=float("-inf"))
        top = tl.maximum(old, new)
        top = tl.where(top == float("-inf"), 0.0, top)
        before, here = tl.exp(old - top), tl.exp(new - top)
        both = tl.where(before + here == 0.0, 1.0, before + here)
        share, own = (before / both).to(tl.float32), (here / both).to(tl.float32)
        acc = tl.load(total + where, stored, other=0.0) * share[:, None] + acc * own[:, None]
        new = tl.where(before + here == 0.0, float("-inf"), top + tl.log(both))
    tl.store(lse, new.to(lse.dtype.element_ty), inside)
    if (flags & _LAST) != 0:
        result = _at(result, places, 5, MANY, b, head, result_b, result_h)
        where = row[:, None] * result_n + column[None, :]
        tl.store(result + where, acc.to(result.dtype.element_ty), stored)
    else:
        tl.store(total + where, acc, stored)


@triton.jit
def _walk_keys_backward(dq, sums, q, do, lse2, delta, k, v, k_n, v_n, stream, steps, steps_n, entries, bounds, count,
                        step, distance, last_key, scale2, ratio, softcap2, least, keep,
                        BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                        DVP: tl.constexpr, MASK: tl.constexpr, HIDDEN: tl.constexpr, CAP: tl.constexpr,
                        CENTRE: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    SUB: tl.constexpr = BLOCK // BN
    own = tl.arange(0, BLOCK)
    off = tl.arange(0, BN) * step
    k0 = tl.load(entries)
    for i in tl.range(0, count * SUB, num_stages=STAGES):
        j = k0 + off
        if MASK:
            j = tl.minimum(j, last_key)
        j = j.to(tl.int64)
        kt = _load_columns(k, j, k_n, D, DP)
        vt = _load_columns(v, j, v_n, DV, DVP)
        s = _dot(q, kt)
        if CAP:
            s, slope = _cap(s, ratio, softcap2)
            p = tl.exp2(s - lse2[:, None])
        else:
            p = tl.exp2(s * scale2 - lse2[:, None])
        if MASK:
            other = (i % SUB) * BN + tl.arange(0, BN)
            p = tl.where(_inside(bounds, tl.load(entries + 2 * (i // SUB) + 1), own, other, BN), p, 0.0)
        if HIDDEN:
            p = tl.where((tl.load(k - FLAGS + j * k_n) == 0.0)[None, :], p, 0.0)
        dp = _dot(do, vt)
        if steps is not None:
            dp = tl.where(_kept(stream, tl.load(steps + j * steps_n), least), dp * keep, 0.0)
        ds = p * (dp - delta[:, None])
        if CAP:
            ds = ds * slope
        if CENTRE:
            sums += tl.sum(ds, 1)
        dq = _dot_add(ds.to(kt.dtype), tl.trans(kt), dq)
        k0 = _next(entries, i, distance, BN * step, SUB)
    return dq, sums


@triton.jit
def dq_kernel(
    q, k, v, do, lse, delta, dq, centre, streams, steps,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    dq_b, dq_h, dq_n, centre_b, centre_h, centre_n, streams_b, streams_h, streams_n, steps_b, steps_h, steps_n,
    table, places, last_row, last_key, scale, scale2, ratio, softcap2, least, keep,
    BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HIDDEN: tl.constexpr, CAP: tl.constexpr, MANY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add a visit's share to dq in fp32. lse is final, in base 2; rows with -inf see no key."""
    table, last_row, last_key = _rank(table, places, last_row, last_key, MANY)
    if MANY:  # noqa: SIM102  # known when the kernel is compiled
        if tl.program_id(0) >= tl.load(table):
            return
    b, head, row, inside, flags, segments, count, entries, bounds = _program(table, last_row, BLOCK)
    qt = _load(_at(q, places, 0, MANY, b, head, q_b, q_h), row, q_n, D, DP)
    dot = _load(_at(do, places, 3, MANY, b, head, do_b, do_h), row, do_n, DV, DVP)
    lse2 = tl.load(_at(lse, places, 4, MANY, b, head, lse_b, lse_h) + row * lse_n)
    dl = tl.load(_at(delta, places, 5, MANY, b, head, delta_b, delta_h) + row * delta_n)
    stream = row
    if streams is not None:
        stream = tl.load(_at(streams, places, 8, MANY, b, head, streams_b, streams_h) + row * streams_n)
    acc = tl.zeros([BLOCK, DP], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for _ in range(count):
        other, step, here, partial, full, distance = _segment(segments, entries)
        kh = _at(k, places, 1, MANY, b, other, k_b, k_h)
        vh = _at(v, places, 2, MANY, b, other, v_b, v_h)
        sh = steps
        if steps is not None:
            sh = _at(steps, places, 9, MANY, b, other, steps_b, steps_h)
        acc, sums = _walk_keys_backward(
            acc, sums, qt, dot, lse2, dl, kh, vh, k_n, v_n, stream, sh, steps_n, here, bounds, partial, step, 0,
            last_key, scale2, ratio, softcap2, least, keep, BN, BLOCK, D, DP, DV, DVP, True, HIDDEN, CAP,
            centre is not None, STAGES)  # fmt: skip
        here += _ENTRY * partial
        acc, sums = _walk_keys_backward(
            acc, sums, qt, dot, lse2, dl, kh, vh, k_n, v_n, stream, sh, steps_n, here, bounds, full, step, distance,
            last_key, scale2, ratio, softcap2, least, keep, BN, BLOCK, D, DP, DV, DVP, False, HIDDEN, CAP,
            centre is not None, STAGES)  # fmt: skip
        segments += _RECORD
    column = tl.arange(0, DP)
    stored = inside[:, None] & (column < D)[None, :]
    if centre is not None:  # keys came without what they share
        shared = tl.load(_at(centre, places, 7, MANY, b, head, centre_b, centre_h) + column, column < D, other=0.0)
        acc += sums[:, None] * shared[None, :]
    acc *= scale
    dq = _at(dq, places, 6, MANY, b, head, dq_b, dq_h) + row[:, None] * dq_n + column[None, :]
    if (flags & _FRESH) == 0:
        acc += tl.load(dq, stored, other=0.0)
    tl.store(dq, acc, stored)


@triton.jit
def _walk_queries(dk, dv, k, v, hidden, q, do, lse, delta, q_n, do_n, lse_n, delta_n, streams, streams_n, stream_step,
                  entries, bounds, count, step, distance, last_row, scale2, ratio, softcap2, least, keep,
                  BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
                  DVP: tl.constexpr, MASK: tl.constexpr, HIDDEN: tl.constexpr, CAP: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    SUB: tl.constexpr = BLOCK // BN
    own = tl.arange(0, BLOCK)
    off = tl.arange(0, BN) * step
    r0 = tl.load(entries)
    for i in tl.range(0, count * SUB, num_stages=STAGES):
        r = r0 + off
        if MASK:
            r = tl.minimum(r, last_row)
        row = r.to(tl.int64)
        qt = _load_columns(q, row, q_n, D, DP)
        lse2 = tl.load(lse + row * lse_n)
        s = _dot(k, qt)
        if CAP:
            s, slope = _cap(s, ratio, softcap2)
            p = tl.exp2(s - lse2[None, :])
        else:
            p = tl.exp2(s * scale2 - lse2[None, :])
        if MASK:
            other = (i % SUB) * BN + tl.arange(0, BN)
            p = tl.where(_inside(bounds, tl.load(entries + 2 * (i // SUB) + 1), own, other, BN), p, 0.0)
        if HIDDEN:
            p = tl.where(hidden[:, None], 0.0, p)
        dot = _load(do, row, do_n, DV, DVP)
        dp = _dot(v, tl.trans(dot))
        if streams is not None:
            kept = _kept(stream_step, tl.load(streams + row * streams_n), least)
            dp = tl.where(kept, dp * keep, 0.0)
            dv = _dot_add(tl.where(kept, p * keep, 0.0).to(dot.dtype), dot, dv)
        else:
            dv = _dot_add(p.to(dot.dtype), dot, dv)
        dl = tl.load(delta + row * delta_n)
        ds = p * (dp - dl[None, :])
        if CAP:
            ds = ds * slope
        dk = _dot_add(ds.to(qt.dtype), tl.trans(qt), dk)
        r0 = _next(entries, i, distance, BN * step, SUB)
    return dk, dv


@triton.jit
def dkv_kernel(
    q, k, v, do, lse, delta, dk, dv, streams, steps,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, do_b, do_h, do_n, lse_b, lse_h, lse_n, delta_b, delta_h, delta_n,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, streams_b, streams_h, streams_n, steps_b, steps_h, steps_n,
    table, places, last_row, last_key, scale, scale2, ratio, softcap2, least, keep,
    BN: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    HIDDEN: tl.constexpr, CAP: tl.constexpr, MANY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add a visit's share to dk and dv in fp32. A program owns a tile of keys, and walks through query rows."""
    table, last_row, last_key = _rank(table, places, last_row, last_key, MANY)
    if MANY:  # noqa: SIM102  # known when the kernel is compiled
        if tl.program_id(0) >= tl.load(table):
            return
    b, head, key, inside, flags, segments, count, entries, bounds = _program(table, last_key, BLOCK)
    kh = _at(k, places, 1, MANY, b, head, k_b, k_h)
    kt = _load(kh, key, k_n, D, DP)
    vt = _load(_at(v, places, 2, MANY, b, head, v_b, v_h), key, v_n, DV, DVP)
    hidden = inside
    if HIDDEN:
        hidden = tl.load(kh - FLAGS + key * k_n) != 0.0
    step_of = key
    if steps is not None:
        step_of = tl.load(_at(steps, places, 9, MANY, b, head, steps_b, steps_h) + key * steps_n)
    dk_acc = tl.zeros([BLOCK, DP], tl.float32)
    dv_acc = tl.zeros([BLOCK, DVP], tl.float32)
    for _ in range(count):
        other, step, here, partial, full, distance = _segment(segments, entries)
        qh = _at(q, places, 0, MANY, b, other, q_b, q_h)
        dh = _at(do, places, 3, MANY, b, other, do_b, do_h)
        lh = _at(lse, places, 4, MANY, b, other, lse_b, lse_h)
        eh = _at(delta, places, 5, MANY, b, other, delta_b, delta_h)
        sh = streams
        if streams is not None:
            sh = _at(streams, places, 8, MANY, b, other, streams_b, streams_h)
        dk_acc, dv_acc = _walk_queries(
            dk_acc, dv_acc, kt, vt, hidden, qh, dh, lh, eh, q_n, do_n, lse_n, delta_n, sh, streams_n, step_of, here,
            bounds, partial, step, 0, last_row, scale2, ratio, softcap2, least, keep, BN, BLOCK, D, DP, DV, DVP, True,
            HIDDEN, CAP, STAGES)  # fmt: skip
        here += _ENTRY * partial
        dk_acc, dv_acc = _walk_queries(
            dk_acc, dv_acc, kt, vt, hidden, qh, dh, lh, eh, q_n, do_n, lse_n, delta_n, sh, streams_n, step_of, here,
            bounds, full, step, distance, last_row, scale2, ratio, softcap2, least, keep, BN, BLOCK, D, DP, DV, DVP,
            False, HIDDEN, CAP, STAGES)  # fmt: skip
        segments += _RECORD
    dk_acc *= scale
    column, wide = tl.arange(0, DP), tl.arange(0, DVP)
    of_k, of_v = inside[:, None] & (column < D)[None, :], inside[:, None] & (wide < DV)[None, :]
    dk = _at(dk, places, 6, MANY, b, head, dk_b, dk_h) + key[:, None] * dk_n + column[None, :]
    dv = _at(dv, places, 7, MANY, b, head, dv_b, dv_h) + key[:, None] * dv_n + wide[None, :]
    if (flags & _FRESH) == 0:
        dk_acc += tl.load(dk, of_k, other=0.0)
        dv_acc += tl.load(dv, of_v, other=0.0)
    tl.store(dk, dk_acc, of_k)
    tl.store(dv, dv_acc, of_v)
