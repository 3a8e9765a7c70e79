"""One case of an audit, with torch alone: its inputs, its exact results, how far a right one may be off, and a verdict.

The script of a failure contains this file, so that it tries what the audit tried: nothing else of the library may be
imported here.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from threading import RLock
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
#: Keywords by which a target may take a mask or an option, see docs/audit.md.
KEYWORDS = ("causal", "window", "sinks", "documents", "padding_mask", "softcap", "sink_logits", "scale", "dropout")
#: Verdicts, the worst last, and those that make an audit fail.
VERDICTS = ("exact", "not offered", "refused", "rounded", "too slow", "crash", "hang", "wrong")
FAILURES = ("wrong", "hang", "crash", "too slow")
#: A result may be this many times as wrong as one of a kernel on one device that accumulates in fp32, and at least this
#: many rounding errors. In 16 bits the rounding of the result itself is most of that, so that less is needed.
TIMES, TIMES_16, ROUNDING, ROUNDING_16 = 8.0, 4.0, 32.0, 0.5
#: The fewest entries of a tensor whose mean error is known well enough to judge.
ENOUGH = 256
#: Different inputs of a case that calls more often; and the calls after which no call may keep another tensor.
DISTINCT, WARM = 4, 50
#: Errors by which a library refuses a call, and these with those that count as crashes; any other ends the rank.
REFUSALS = (NotImplementedError, ValueError)
ERRORS = (
    *(*REFUSALS, RuntimeError, AssertionError, AttributeError, LookupError),
    *(ArithmeticError, ImportError, OSError, TypeError),
)


@dataclass(frozen=True)
class Case:
    """One case: the sizes of a whole sequence, a mask, and how the target is called.

    The target is the audited function; `mask` has its keyword arguments. `keys` and `value_dim` are 0 if k has as many
    tokens as q, and v its width. `groups`: the ranks of each process group, which has a sequence of its own, with its
    share of the tokens; without any, all ranks share one. `ways` may contain: large (logits beyond the range of exp),
    shared (so by a component that all keys have), lse (also return lse), dlse (with its gradient), no_grad, no_dk (keys
    need no gradient), twice (run a second backward), crossed (all forwards, then all backwards), strided (views),
    checkpoint, compile, differ (rank 1 has another dtype), and bits (1 to 4 ranks give the same bits).
    """

    feature: str
    tokens: int = 24
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    mask: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ()
    calls: int = 2
    keys: int = 0
    value_dim: int = 0
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def needs(self) -> set[str]:
        """The names of the keyword arguments that this case passes to the audited function."""
        needed = {"padding_mask" if name in ("left", "padding") else name for name in self.mask}
        return needed | ({"return_lse"} if "lse" in self.ways else set())

    @property
    def real(self) -> tuple[int, int]:
        """(first, end) of the tokens that are not padding."""
        return self.mask.get("left", 0), self.tokens - self.mask.get("padding", 0)

    def is_real(self, rows: Tensor) -> Tensor:
        """For token indices `rows`, whether each is not padding."""
        return (rows >= self.real[0]) & (rows < self.real[1])


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case on one rank; for a wrong result, which tensor and rows are wrong, and by how much.

    `error` and `tolerance` are relative to the largest entry of the exact tensor. `stack` shows where a rank hangs.
    """

    verdict: str
    why: str = ""
    tensor: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    stack: str = ""


class WrongError(Exception):
    """A result has the wrong type, shape or dtype."""


def accepts(target: Callable[..., Any]) -> set[str]:
    """The names of the keyword arguments that the audited function takes; none if it has no signature."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:
        return set()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return {*KEYWORDS, "return_lse", "group"}
    return {one.name for one in parameters}


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


def see(case: Case) -> Tensor:
    """bool [tokens, keys]: which keys (columns) each query (row) attends."""
    mask, place = case.mask, torch.arange(case.keys or case.tokens, device="cpu")
    distance = torch.arange(case.tokens, device="cpu")[:, None] - place
    seen = torch.ones(distance.shape, dtype=torch.bool, device="cpu")
    if mask.get("causal"):
        seen &= distance >= 0
    if (window := mask.get("window")) is not None:
        near = distance <= window
        seen &= near | (place < mask["sinks"]) if mask.get("sinks") else near
    if mask.get("documents"):
        lengths = torch.tensor(mask["documents"], device="cpu")
        number = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), lengths)
        seen &= number[:, None] == number
    return seen if case.keys else seen & case.is_real(place)


def make_sink_logits(case: Case) -> Tensor:
    """The learned sink logits of a case, [H]: for each query head, the logit of an extra key."""
    return torch.linspace(-1.0, 1.0, case.heads, device="cpu")


def make_inputs(case: Case, call: int = 0, group: int = 0) -> list[Tensor]:
    """q, k, v and the gradients of out and lse for the whole sequence, in fp64, rounded to the dtype of the case.

    Each call of each group has its own. With dropout, v is the unit matrix, so that out contains every attention
    weight. The gradients are 0 for padding.
    """
    source = torch.Generator().manual_seed(zlib.crc32(f"{case.feature} {call} {group}".encode()))
    many, width, keys = (case.batch, case.heads, case.tokens), case.value_dim or case.head_dim, case.keys or case.tokens
    few = (case.batch, case.kv_heads, keys)
    made: Any = {"dtype": torch.float64, "device": "cpu"}
    shapes = ((*many, case.head_dim), (*few, case.head_dim), (*few, width), (*many, width), many)
    q, k, v, grad, grad_lse = (torch.randn(shape, generator=source, **made) for shape in shapes)
    if "large" in case.ways and call % 3 == 0:
        q *= 60
    elif "large" in case.ways:  # logits that rise or fall by 240 along the keys
        k[..., 0], q[..., 0] = torch.linspace(0, 30, keys, **made), (8 if call % 3 == 1 else -8) * case.head_dim**0.5
    if "shared" in case.ways:  # a part of +120 or -120 in all logits of a row
        sign = 1 - 2 * (torch.arange(case.tokens, device="cpu") % 2)
        k[..., 0], q[..., 0] = k[..., 0] + 40, 3 * case.head_dim**0.5 * sign
    if case.mask.get("dropout"):
        v = torch.eye(case.tokens, **made).expand(v.shape).clone()
    for x in (grad, grad_lse):
        x[:, :, ~case.is_real(torch.arange(case.tokens, device="cpu"))] = 0.0
    return [x.to(getattr(torch, case.dtype)).double() for x in (q, k, v, grad, grad_lse)]


def attend_exactly(
    case: Case, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, kernel: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Dense attention: (out [B, H, N, D], lse [B, H, N]) of q [B, H, N, D] and k, v [B, K, N, D], in their dtype.

    Rows that see no key have out 0. `keep` [B, H, N, N] is 1 / (1 - p) for weights that dropout kept, and 0 for dropped
    ones. With `kernel`, a dtype, this errs as a kernel that accumulates in fp32 does: by a rounding of the largest
    logit in the log-sum-exp that it merges and stores, and in 16 bits by those of weights, gradients of scores, and
    out.
    """
    group, seen = case.heads // case.kv_heads, see(case).to(q.device)
    scores = q @ k.repeat_interleave(group, 1).mT * (case.mask.get("scale") or case.head_dim**-0.5)
    if cap := case.mask.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    logits = scores.masked_fill(~seen, float("-inf"))
    if case.mask.get("sink_logits"):
        sink = make_sink_logits(case).to(q)[None, :, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    lse = logits.logsumexp(-1)
    if kernel is not None:
        sign = 1 - 2 * (torch.arange(lse.shape[2], device=lse.device) % 2)
        lse = lse + sign * torch.finfo(torch.float32).eps * scores.detach().abs().masked_fill(~seen, 0.0).amax(-1)
    weights = (logits - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()[..., : k.shape[2]]
    weights = weights if keep is None else weights * keep
    small = kernel is not None and kernel.itemsize == 2
    if small:
        weights = weights + (weights.to(kernel).to(q) - weights).detach()
    out = weights @ v.repeat_interleave(group, 1)
    if small:  # the backward reads the rounded out
        lost, off = (out - out.to(kernel).to(q)).detach(), list[Tensor]()
        out.register_hook(lambda grad: off.append((grad * lost).sum(-1, keepdim=True)))
        scores.register_hook(lambda grad: (grad + weights.detach() * off.pop()).to(kernel).to(q))
    return out, lse


def solve(
    case: Case, inputs: Sequence[Tensor], dtype: torch.dtype = torch.float64, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of a case, as fp64: exact ones, or in another dtype as a kernel on one device errs."""
    kernel = None if dtype == torch.float64 else dtype
    dtype = torch.float32 if kernel else dtype
    *qkv, grad, grad_lse = (x.to(dtype) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = attend_exactly(case, leaves[0], leaves[1], leaves[2], None if keep is None else keep.to(dtype), kernel)
    out = out.masked_fill(~see(case).any(-1)[:, None], 0.0)
    ends = ((out, lse), (grad, grad_lse)) if "dlse" in case.ways else ((out,), (grad,))
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(ends[0], leaves, ends[1])), strict=True))
    found = {name: x.to(kernel or dtype) for name, x in found.items()}
    return {name: x.detach().double() for name, x in {**found, "lse": lse}.items()}


def find_tolerance(
    alone: Tensor, exact: Tensor, dtype: torch.dtype, scale: float, times: float = 0.0
) -> tuple[float, float]:
    """(largest error to accept, root of the mean square to accept), relative to `scale`.

    Both are a multiple of what `alone` has, the result of one device in this dtype; and they have a least.
    """
    small = dtype.itemsize == 2
    times, least = times or (TIMES_16 if small else TIMES), (ROUNDING_16 if small else ROUNDING)
    off, size = _finite(alone - exact), _finite(exact)
    mean = _mean(off) if off.numel() >= ENOUGH else inf
    least *= torch.finfo(dtype).eps
    return (max(times * float(off.abs().max()) / scale, least), max(times * mean, least * _mean(size)) / scale)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _mean(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def check(
    name: str, ours: Tensor, exact: Tensor, allowed: tuple[float, float], rows: Tensor | None, scale: float
) -> Verdict:
    """Compare one tensor with the exact one; the verdict is "exact" or "wrong". `allowed` is from `find_tolerance`.

    `rows` are the positions along the third dim, with which the verdict names wrong rows.
    """
    away = (ours.double().cpu() - exact).abs().masked_fill(~exact.isfinite(), 0.0).nan_to_num(nan=inf, posinf=inf)
    error = float(away.max()) / scale if away.numel() else 0.0
    mean = _mean(away) / scale
    if error <= allowed[0] and mean <= allowed[1]:
        return Verdict("exact", tensor=name, error=error, tolerance=allowed[0])
    if error <= allowed[0]:
        why = f"{name} as a whole: the root mean square of its error is {mean:.0e}, allowed {allowed[1]:.0e}"
        return Verdict("wrong", why, name, error, allowed[0])
    if rows is None:
        return Verdict("wrong", name, name, error, allowed[0])
    by_row = away.amax([i for i in range(away.dim()) if i != 2])
    wrong = rows[by_row > allowed[0] * scale].tolist()
    spelled = f"{wrong[0]} .. {wrong[-1]} ({len(wrong)})" if len(wrong) > 1 else str(wrong[0])
    return Verdict("wrong", f"{name} of rows {spelled}", name, error, allowed[0])


def choose(verdicts: Sequence[Verdict]) -> Verdict:
    """The first of the worst verdicts; if all are "exact", the one that is nearest to its tolerance."""
    worst = max(VERDICTS.index(one.verdict) for one in verdicts)
    if worst:
        return next(one for one in verdicts if one.verdict == VERDICTS[worst])
    return max(verdicts, key=lambda one: one.error / max(one.tolerance, 1e-30))


def first_words(error: BaseException) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".rstrip(": ")


def judge(compare: Callable[[], Verdict]) -> Verdict:
    """Return the verdict of `compare`; if `compare` raises an exception, the verdict "refused", "wrong" or "crash".

    Collective if the audited function is.
    """
    try:
        return compare()
    except WrongError as error:
        return Verdict("wrong", str(error), "out")
    except ImportError as error:
        return Verdict("crash", f"the target needs what is not installed: {first_words(error)}")
    except ERRORS as error:
        return Verdict("refused" if isinstance(error, REFUSALS) else "crash", first_words(error))


def check_tensor(name: str, x: object, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise WrongError unless `x` is a tensor of this shape and dtype; with dtype None, any dtype is right."""
    if not isinstance(x, Tensor):
        raise WrongError(f"{name} is of type {type(x).__name__}, not a tensor")
    if tuple(x.shape) != tuple(shape):
        raise WrongError(f"{name} has shape {tuple(x.shape)}, not {tuple(shape)}")
    if dtype is not None and x.dtype != dtype:
        raise WrongError(f"{name} has dtype {x.dtype}, not {dtype}")


def prepare(target: Callable[..., Any], case: Case, device: torch.device) -> Callable[[], Verdict]:
    """Make the inputs and exact results of a case; returns a function that calls the target and compares. Collective.

    Every call has other inputs, and the gradient of the output is random.
    """
    if "bits" in case.ways:
        return _prepare_bits(target, case, device)
    joined = [dist.new_group([*ranks]) for ranks in case.groups] or [dist.group.WORLD]
    members = case.groups or (tuple(range(dist.get_world_size())),)
    number = next((i for i, ranks in enumerate(members) if dist.get_rank() in ranks), None)
    if number is None:  # this rank is in no group
        return lambda: Verdict("exact", tolerance=1.0)
    case = replace(case, tokens=case.tokens * len(members[number]) // dist.get_world_size())
    trial = _Attempt(target, case, device, joined[number], members[number].index(dist.get_rank()), len(members[number]))
    trial.solve(number)
    return trial.compare


class _Attempt:
    """A case on this rank."""

    def __init__(
        self, target: Callable[..., Any], case: Case, device: torch.device, group: Any, rank: int, ranks: int
    ) -> None:
        self.target, self.case, self.device, self.group, self.ranks = target, case, device, group, ranks
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.row_sets = [place_rows(target, case.tokens, i, ranks) for i in range(ranks)]
        self.rows, self.key_rows = self.row_sets[rank], place_rows(target, case.keys or case.tokens, rank, ranks)
        self.given = torch.float64 if "differ" in case.ways and rank == 1 else self.dtype

    def solve(self, number: int) -> None:
        """Make the inputs of the group of this number, and their exact results."""
        many = range(min(self.case.calls, DISTINCT))
        self.problems = [make_inputs(self.case, call, number) for call in many]
        known = not ({"differ"} & {*self.case.ways} or self.case.mask.get("dropout"))
        self.answers = [self.answer(inputs) for inputs in self.problems] if known else []

    def answer(self, inputs: Sequence[Tensor], keep: Tensor | None = None) -> dict[str, Any]:
        """By tensor: (the exact one, the tolerance, that of fp32 if it is another, the scale)."""
        # The exact result has fp64 itself: what a call in fp64 may err follows from the error of one in fp32.
        ruler = torch.float32 if self.dtype == torch.float64 else self.dtype
        exact, alone, answer = solve(self.case, inputs, keep=keep), solve(self.case, inputs, ruler, keep), {}
        for name, right in exact.items():
            scale = float(_finite(right).abs().max()) if right.numel() else 0.0
            coarse = find_tolerance(alone[name], right, torch.float32 if name == "lse" else ruler, scale or 1.0)
            ratio = 1.0 if name == "lse" else torch.finfo(self.dtype).eps / torch.finfo(ruler).eps
            answer[name] = right, (coarse[0] * ratio, coarse[1] * ratio), coarse, scale or 1.0
        return answer

    def prepare_call(self) -> Callable[..., tuple[Any, Any]]:
        """The call of the target with the case's keywords; returns (out, lse or None)."""
        case, rows = self.case, self.rows
        keywords = {name: value for name, value in case.mask.items() if name not in ("sink_logits", "padding", "left")}
        if "padding_mask" in case.needs:
            keywords["padding_mask"] = (~case.is_real(rows)).expand(case.batch, -1).to(self.device)
        if case.mask.get("sink_logits"):
            keywords["sink_logits"] = make_sink_logits(case).to(self.device)
        if "lse" in case.ways:
            keywords["return_lse"] = True
        if "bits" in case.ways and "same_bits" in accepts(self.target):
            keywords["same_bits"] = True

        def attend(*qkv: Tensor) -> tuple[Any, Any]:
            result = self.target(*qkv, group=self.group, **keywords)
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

    def compare(self) -> Verdict:
        """Make all calls of the case; returns the worst verdict. No rank leaves early, as others would wait for it."""
        case, call, verdicts, held = self.case, self.prepare_call(), list[Verdict](), 0
        if "crossed" in case.ways:
            begun = [self.forward(call, i) for i in range(case.calls)]
            verdicts = [self.backward(*one) for one in begun]
        else:
            for i in range(case.calls):
                verdicts.append(self.backward(*self.forward(call, i)))
                held = _count_tensors() if i == WARM else held
        kept = _count_tensors() - held if case.calls > WARM else 0
        if case.calls > WARM and kept > (case.calls - WARM) / 2:
            verdicts.append(Verdict("wrong", f"{case.calls - WARM} calls kept {kept} tensors alive", "memory"))
        worst = choose(verdicts)
        turns = [i for i, one in enumerate(verdicts[: case.calls], 1) if one is worst]
        if worst.verdict != "wrong" or case.calls == 1 or not turns:
            return worst
        return replace(worst, why=f"{worst.why}, in call {turns[0]} of {case.calls}")

    def forward(
        self, call: Callable[..., tuple[Any, Any]], turn: int
    ) -> tuple[int, list[Tensor], list[Tensor], Any, Any]:
        """Call the target; returns (which inputs, the tensors passed, copies of them, out, lse)."""
        number, ways = turn % len(self.problems), self.case.ways
        q, k, v, grad, grad_lse = self.problems[number]
        made = [q[:, :, self.rows], *(x[:, :, self.key_rows] for x in (k, v)), grad[:, :, self.rows]]
        passed = [x.to(self.given).to(self.device) for x in (*made, grad_lse[:, :, self.rows])]
        if "strided" in ways:
            passed = [torch.stack([x, x], -1)[..., 0] for x in passed]
        copies = [x.clone() for x in passed]
        for i, x in enumerate(passed[:3]):
            x.requires_grad_("no_grad" not in ways and not ("no_dk" in ways and i == 1))
        with torch.set_grad_enabled("no_grad" not in ways):
            out, lse = call(*passed[:3])
        if "differ" not in ways:
            check_tensor("out", out, (*made[0].shape[:3], v.shape[3]), self.dtype)
            if "lse" in ways:
                check_tensor("lse", lse, out.shape[:3])
        return number, passed, copies, out, lse

    def backward(self, number: int, passed: list[Tensor], copies: list[Tensor], out: Tensor, lse: Any) -> Verdict:
        """Compute the gradients, and compare everything."""
        case, found = self.case, {"out": out.detach()}
        if "differ" in case.ways:
            return Verdict("wrong", "no rank raised an error, although rank 1 has another dtype", "out")
        if "lse" in case.ways:
            found["lse"] = lse.detach()
        wanted = {f"d{name}": x for name, x in zip("qkv", passed[:3], strict=True) if x.requires_grad}
        if wanted:
            ends = [out], [passed[3]]
            if "dlse" in case.ways:
                if not lse.requires_grad:
                    return Verdict("not offered", "its log-sum-exp has no gradient")
                ends = [out, lse], [passed[3], passed[4].to(lse.dtype)]
            leaves = [*wanted.values()]
            grads = torch.autograd.grad(ends[0], leaves, ends[1], retain_graph="twice" in case.ways)
            if "twice" in case.ways:
                grads = torch.autograd.grad(ends[0], leaves, ends[1])
            found |= dict(zip(wanted, grads, strict=True))
        keep = self.find_dropped(out) if case.mask.get("dropout") else None
        answer = self.answers[number] if keep is None else self.answer(self.problems[number], keep)
        named = zip(("q", "k", "v", "the gradient of out"), passed, copies, strict=False)
        changed = [name for name, x, copy in named if not torch.equal(x, copy)]
        verdicts = [Verdict("wrong", f"{name} was changed by the call", name) for name in changed]
        verdicts += [self.check(name, ours, answer[name]) for name, ours in found.items()]
        return choose(verdicts)

    def check(self, name: str, ours: Tensor, answer: tuple[Tensor, Any, Any, float]) -> Verdict:
        """The verdict on one tensor of this rank."""
        exact, allowed, coarse, scale = answer
        rows = self.key_rows if name in ("dk", "dv") else self.rows
        if name in ("out", "lse"):  # what rows of padding return does not matter, as their cotangent is 0
            real = self.case.is_real(rows)
            ours, rows = ours[:, :, real.to(ours.device)], rows[real]
        verdict = check(name, ours, exact[:, :, rows], allowed, rows, scale)
        if verdict.verdict == "wrong" and self.dtype == torch.float64:
            in_fp32 = check(name, ours, exact[:, :, rows], coarse, rows, scale)
            if in_fp32.verdict == "exact":
                return replace(in_fp32, verdict="rounded", why=f"{name} is computed in fp32")
        return verdict

    def find_dropped(self, out: Tensor) -> Tensor:
        """1 / (1 - p) for each weight that dropout kept, [B, H, N, N]: the outputs of all ranks show them."""
        case, sets = self.case, self.row_sets
        whole = torch.zeros(case.batch, case.heads, case.tokens, case.tokens, dtype=torch.float64, device=out.device)
        whole[:, :, self.rows.to(out.device)] = out.detach().double()
        dist.all_reduce(whole)
        seen, shown, share = see(case), whole.cpu(), 1 - case.mask["dropout"]
        kept = (shown != 0) & seen
        found = float(kept.sum() / (seen.sum() * case.batch * case.heads))
        first = kept[:, :, :, 0]
        same = (kept[:, :, sets[0]] == kept[:, :, sets[1]])[..., seen[sets[0]] & seen[sets[1]]]
        if abs(found - share) > 0.08:
            raise WrongError(f"dropout={1 - share:g} kept {found:.0%} of the weights")
        if (first == first[:, :1]).all():
            raise WrongError("dropout is the same in all heads")
        if float(same.double().mean()) > 0.9:
            raise WrongError("ranks drop the same weights of their rows")
        return kept.double() / share


class _BitsAttempt(_Attempt):
    """Keeps the bytes of the results of all ranks, by name."""

    def check(self, name: str, ours: Tensor, answer: tuple[Tensor, Any, Any, float]) -> Verdict:
        rows = self.key_rows if name in ("dk", "dv") else self.rows
        whole = torch.zeros(*ours.shape[:2], answer[0].shape[2], *ours.shape[3:], dtype=ours.dtype, device=ours.device)
        whole[:, :, rows.to(ours.device)] = ours
        dist.all_reduce(whole.view(torch.uint8), group=self.group)
        vars(self).setdefault("bits", {})[name] = whole
        return super().check(name, ours, answer)


def _prepare_bits(target: Callable[..., Any], case: Case, device: torch.device) -> Callable[[], Verdict]:
    """`prepare` for the first rank, the first two, and so on, of which each group gets the same whole inputs.

    Other bits are wrong if the target has an argument `same_bits`, which promises them; else the verdict is "rounded".
    """
    trials, rank = list[_BitsAttempt](), dist.get_rank()
    for many in range(1, min(dist.get_world_size(), 4) + 1):
        group = dist.new_group([*range(many)])
        if rank < many:
            trials.append(_BitsAttempt(target, case, device, group, rank, many))
            trials[-1].solve(0)

    def compare() -> Verdict:
        promised, verdicts = "same_bits" in accepts(target), [Verdict("exact", tolerance=1.0)]
        try:
            verdicts += [trial.compare() for trial in trials]
        except ERRORS as error:
            if promised:
                raise
            return Verdict("not offered", f"on {trials[len(verdicts) - 1].ranks} ranks: {first_words(error)}")
        for trial in trials if rank == 0 else ():  # this rank alone is in all groups
            for name, bits in vars(trial)["bits"].items():
                if not torch.equal(bits.view(torch.uint8), vars(trials[0])["bits"][name].view(torch.uint8)):
                    why = f"{name} has other bits on {trial.ranks} ranks than on one"
                    verdicts.append(Verdict("wrong" if promised else "rounded", why, name))
        return choose(verdicts)

    return compare


def _count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def run_script(
    load: Callable[[], Any], case: Case, ranks: int, backend: str, seconds: float = 600.0, prepare: Any = prepare
) -> None:
    """Try a case on new ranks, and end this process as `git bisect run` expects.

    The status is 0 if the case is right, 1 if it is wrong, crashes or has no result in so many seconds, and 125 if the
    target cannot be imported, or refuses the case.
    """
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True  # the next commit may have the same time and size
    try:
        load()
    except ImportError as error:
        sys.stdout.write(f"{first_words(error)}\n")
        sys.exit(125)
    context: Any = multiprocessing.get_context("fork" if backend == "gloo" and hasattr(os, "fork") else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (load, case, ranks, backend, f"file://{folder}/meeting", prepare)
        processes = [context.Process(target=_try, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        end = monotonic() + seconds
        while monotonic() < end and any(one.is_alive() for one in processes):
            sleep(0.05)
            if any(one.exitcode for one in processes):  # the others may wait for it
                end = min(end, monotonic() + 5)
        codes = [one.exitcode for one in processes]
        for rank, process in enumerate(processes):
            if process.is_alive():
                sys.stdout.write(f"rank {rank}: no result\n")
                process.kill()
            process.join()
    told = [code for code in codes if code is not None] or [1]
    sys.exit(1 if any(code not in (0, 125) for code in told) else max(told))


def _try(rank: int, load: Callable[[], Any], case: Case, ranks: int, backend: str, meeting: str, prepare: Any) -> None:
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    verdict = judge(prepare(load(), case, device))
    off = f", by {verdict.error:.1e}, allowed {verdict.tolerance:.1e}" if verdict.error else ""
    sys.stdout.write(f"rank {rank}: {verdict.verdict} {verdict.why}{off}\n")
    sys.stdout.flush()
    # Gloo's threads may hold tensors while Python ends, which aborts.
    os._exit({"exact": 0, "rounded": 0, "refused": 125, "not offered": 125}.get(verdict.verdict, 1))
