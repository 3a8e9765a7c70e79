"""One case on one rank: the target's results beside the oracle's, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ...errors import InvalidInput
from ...text import did_you_mean, first_line
from .cases import Case, accepts
from .oracle import NAMES, make_inputs, make_sink_logits, see, solve
from .oracle import attend as attend_dense

Tensor = torch.Tensor
#: A result may be this many times as wrong as a call on one device, and at least this many rounding errors; in 16
#: bits, where a call on one device errs by several of them, fewer.
TIMES, ROUNDING, ROUNDING_16 = 8.0, 32.0, 4.0
#: The largest tolerance, as a part of the largest entry.
MOST = 0.2
#: Errors by which a library refuses a call, and these with those that count as crashes; any other ends the rank.
REFUSALS = (NotImplementedError, ValueError)
ERRORS = (
    *(*REFUSALS, RuntimeError, AssertionError, AttributeError, LookupError),
    *(ArithmeticError, ImportError, OSError, TypeError),
)
#: What the attributes `layout` and `dtype` of a target may be; a layout may also be a function.
LAYOUTS, DTYPES = ("contiguous", "zigzag", "striped"), ("float32", "float64", "bfloat16", "float16")
#: Verdicts, the worst last.
VERDICTS = ("exact", "not offered", "refused", "too slow", "crash", "hang", "wrong")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a test case on one rank; for a wrong result, which tensor and rows are wrong, and by how much.

    `error` and `tolerance` are relative to the largest entry of the exact tensor.
    """

    verdict: str
    why: str = ""
    tensor: str = ""
    error: float = 0.0
    tolerance: float = 0.0


def place_rows(target: Callable[..., Any], tokens: int, rank: int, ranks: int) -> Tensor:
    """The positions of a rank's rows by the attribute `layout` of the audited function; see docs/audit.md."""
    layout = getattr(target, "layout", "contiguous")
    if callable(layout):
        return torch.as_tensor(layout(tokens, rank, ranks), device="cpu")
    place = torch.arange(tokens, device="cpu")
    if layout == "striped":
        return place[rank::ranks]
    if layout == "zigzag":
        pieces = place.tensor_split(2 * ranks)
        return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
    return place.tensor_split(ranks)[rank]


def check_target(name: str, target: Callable[..., Any], cases: Sequence[Case], ranks: int) -> None:
    """Raise InvalidInput if the `layout` or `dtype` of the audited function is unknown.

    Also if the layout cannot shard the sequences of these cases.
    """
    for key, default, known in (("layout", LAYOUTS[0], LAYOUTS), ("dtype", DTYPES[0], DTYPES)):
        value = getattr(target, key, default)
        if value not in known and not (key == "layout" and callable(value)):
            hint = did_you_mean(str(value), known)
            raise InvalidInput(f"target={name}: {key}={value!r}: {hint}expected one of {', '.join(known)}")
    for tokens in {case.tokens for case in cases}:
        try:
            rows = torch.cat([place_rows(target, tokens, rank, ranks) for rank in range(ranks)]).tolist()
        except ERRORS as error:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {ranks}): {first_line(error)}") from None
        if sorted(rows) != [*range(tokens)]:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {ranks}) must give each position to one rank")


def judge(compare: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of `compare`; if `compare` raises an exception, the verdict "refused", "wrong" or "crash".

    Collective if the audited function is.
    """
    try:
        return compare()
    except WrongError as error:
        return Verdict("wrong", str(error), "out")
    except ERRORS as error:
        verdict = "refused" if isinstance(error, REFUSALS) else "crash"
        return Verdict(verdict, f"{type(error).__name__}: {first_line(error)}")


class WrongError(Exception):
    """A result has the wrong type, shape or dtype."""


def check_tensor(name: str, x: object, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise WrongError unless `x` is a tensor of this shape and dtype; with dtype None, any dtype is right."""
    if not isinstance(x, Tensor):
        raise WrongError(f"{name} is of type {type(x).__name__}, not a tensor")
    if tuple(x.shape) != tuple(shape):
        raise WrongError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if dtype is not None and x.dtype != dtype:
        raise WrongError(f"{name} has dtype {x.dtype}, not {dtype}")


def compare(target: Callable[..., Any], case: Case, device: torch.device) -> Verdict:
    """Call the audited function on this rank's shards, and compare its results with exact ones. Collective.

    The gradient of the output is random.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, dtype = place_rows(target, case.tokens, rank, ranks), getattr(torch, case.dtype)
    if "differ" in case.ways and rank == 1:
        dtype = torch.float64
    *inputs, grad = (x[:, :, rows].to(dtype).to(device) for x in make_inputs(case))
    if "strided" in case.ways:
        inputs = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    call = _prepare(target, case, rows, device)
    if "again" in case.ways:  # buffers of this call must not reach the next
        others = [x.neg().requires_grad_() for x in inputs]
        torch.autograd.grad(call(*others)[0].sum(), others)
    leaves = [x.detach().requires_grad_(not ("no_dk" in case.ways and i == 1)) for i, x in enumerate(inputs)]
    out, lse = call(*leaves)
    if "differ" in case.ways:
        return Verdict("wrong", "no rank raised an error, although rank 1 has another dtype", "out")
    check_tensor("out", out, (*inputs[0].shape[:3], inputs[2].shape[3]), dtype)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, grad, retain_graph="twice" in case.ways))
    if "twice" in case.ways:
        grads = iter(torch.autograd.grad(out, wanted, grad))
    found = [out.detach(), *(next(grads) if leaf.requires_grad else None for leaf in leaves)]
    keep = _find_dropped(case, out, ranks, target) if case.mask.get("dropout") else None
    verdict = _worst(case, rows, found, keep)
    if verdict.verdict == "exact" and "lse" in case.ways:
        check_tensor("lse", lse, out.shape[:3])
        exact = attend_dense(case, *make_inputs(case)[:3])[1]
        verdict = check("lse", lse.detach(), exact[:, :, rows], ROUNDING * torch.finfo(torch.float32).eps, rows)
    return verdict


def _prepare(
    target: Callable[..., Any], case: Case, rows: Tensor, device: torch.device
) -> Callable[..., tuple[Tensor, Any]]:
    """The call of the target with the case's keywords; returns (out, lse or None)."""
    keywords = {name: value for name, value in case.mask.items() if name not in ("sink_logits", "padding", "left")}
    if "padding_mask" in case.needs:
        keywords["padding_mask"] = (~case.is_real(rows)).expand(case.batch, -1).to(device)
    if case.mask.get("sink_logits"):
        keywords["sink_logits"] = make_sink_logits(case).to(device)
    if "lse" in case.ways and "return_lse" in accepts(target):
        keywords["return_lse"] = True

    def attend(*qkv: Tensor) -> tuple[Tensor, Any]:
        result = target(*qkv, group=dist.group.WORLD, **keywords)
        if isinstance(result, tuple) and len(result) != 2:
            raise WrongError(f"the target returned {len(result)} values, not out or (out, lse)")
        return result if isinstance(result, tuple) else (result, None)

    if "compile" in case.ways:
        set_lock = getattr(vars(torch.hub)["tqdm"], "set_lock", None)
        if set_lock is not None:
            set_lock(RLock())  # the default is a semaphore between processes, which would outlive this one
        return torch.compile(attend, backend="aot_eager")
    if "checkpoint" in case.ways:
        return lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)
    return attend


def _find_dropped(case: Case, out: Tensor, ranks: int, target: Callable[..., Any]) -> Tensor:
    """1 / (1 - p) for each weight that dropout kept, [B, H, N, N], as the outputs of all ranks show; v is a unit."""
    whole = torch.zeros(case.batch, case.heads, case.tokens, case.tokens, dtype=torch.float64, device=out.device)
    whole[:, :, place_rows(target, case.tokens, dist.get_rank(), ranks).to(out.device)] = out.detach().double()
    dist.all_reduce(whole)
    seen, shown, share = see(case), whole.cpu(), 1 - case.mask["dropout"]
    kept = (shown != 0) & seen
    found = float(kept.sum() / (seen.sum() * case.batch * case.heads))
    first = kept[:, :, :, 0]
    first_rows, others = (place_rows(target, case.tokens, i, ranks)[: case.tokens // ranks] for i in (0, 1))
    same = (kept[:, :, first_rows] == kept[:, :, others])[..., seen[first_rows] & seen[others]]
    if abs(found - share) > 0.08:
        raise WrongError(f"dropout={1 - share:g} kept {found:.0%} of the weights")
    if (first == first[:, :1]).all():
        raise WrongError("dropout is the same in all heads")
    if float(same.double().mean()) > 0.9:
        raise WrongError("ranks drop the same weights of their rows")
    return kept.double() / share


def _worst(case: Case, rows: Tensor, found: Sequence[Tensor | None], keep: Tensor | None) -> Verdict:
    """The verdict on the first tensor that is wrong, else on the one that is nearest to its tolerance."""
    dtype = getattr(torch, case.dtype)
    # The exact result has fp64 itself: what a call in fp64 may err follows from the error of one in fp32.
    ruler = torch.float32 if dtype == torch.float64 else dtype
    exact, single = solve(case, torch.float64, keep), solve(case, ruler, keep)
    verdicts = []
    for name, ours, right, alone in zip(NAMES, found, exact, single, strict=True):
        if ours is not None:
            scale = float(right.abs().max()) or 1.0
            tolerance = find_tolerance(alone, right, scale, ruler) * torch.finfo(dtype).eps / torch.finfo(ruler).eps
            # What rows of padding return does not matter, as their cotangent is 0.
            real = case.is_real(rows) | (name != "out")
            shown = rows[real]
            verdicts.append(check(name, ours[:, :, real.to(ours.device)], right[:, :, shown], tolerance, shown, scale))
    return choose(verdicts)


def choose(verdicts: Sequence[Verdict]) -> Verdict:
    """The first verdict that is "wrong"; if there is none, the one whose error is nearest to its tolerance."""
    wrong = [one for one in verdicts if one.verdict == "wrong"]
    return wrong[0] if wrong else max(verdicts, key=lambda one: one.error / one.tolerance)


def find_tolerance(alone: Tensor, exact: Tensor, scale: float, dtype: torch.dtype) -> float:
    """The largest error to accept, relative to `scale`.

    It is a multiple of the error that a call on one device has in this dtype, within two bounds.
    """
    least = (ROUNDING if dtype.itemsize > 2 else ROUNDING_16) * torch.finfo(dtype).eps
    return min(max(TIMES * float((alone - exact).abs().max()) / scale, least), MOST)


def check(
    name: str, ours: Tensor, exact: Tensor, tolerance: float, rows: Tensor | None, scale: float | None = None
) -> Verdict:
    """Compare one tensor with the exact one; the verdict is "exact" or "wrong".

    `rows` are the positions along the third dim, with which the verdict names wrong rows.
    """
    finite = exact.isfinite()
    away = (ours.double().cpu() - exact).abs().masked_fill(~finite, 0.0)
    away = away.nan_to_num(nan=inf, posinf=inf)
    if not away.numel():
        return Verdict("exact", tensor=name, tolerance=tolerance)
    scale = scale or float(exact.masked_fill(~finite, 0.0).abs().max()) or 1.0
    error = float(away.max()) / scale
    if error <= tolerance:
        return Verdict("exact", tensor=name, error=error, tolerance=tolerance)
    if rows is None:
        return Verdict("wrong", name, name, error, tolerance)
    by_row = away.amax([i for i in range(away.dim()) if i != 2])
    wrong = rows[by_row > tolerance * scale].tolist()
    return Verdict("wrong", f"{name} of rows {_spell(wrong)}", name, error, tolerance)


def _spell(rows: Sequence[int]) -> str:
    return f"{rows[0]} .. {rows[-1]} ({len(rows)})" if len(rows) > 1 else str(rows[0] if rows else "none")
