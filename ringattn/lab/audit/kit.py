"""One case of an audit, with torch alone: its inputs, its exact results, how far a right one may be off, and a verdict.

The script of a failure contains this file, so that it tries what the audit tried: nothing else of the library may be
imported here.
"""

from __future__ import annotations

import gc
import inspect
import os
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from threading import RLock
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
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
    checkpoint, compile, differ (rank 1 has another dtype), cache (the first call has a prompt, each later one the next
    token), and bits (1 to 4 ranks give the same bits).
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
        return needed | {name for way, name in (("lse", "return_lse"), ("cache", "cache")) if way in self.ways}

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

    `error` and `tolerance` are relative to the largest entry of the exact tensor. `stack` shows where a rank hangs, and
    `seconds` how long it had, see `audit`.
    """

    verdict: str
    why: str = ""
    tensor: str = ""
    error: float = 0.0
    tolerance: float = 0.0
    stack: str = ""
    seconds: float = 0.0

    @property
    def told(self) -> str:
        """The verdict in words: why, and by how much."""
        off = f"by {self.error:.1e} of the largest entry, allowed {self.tolerance:.1e}" if self.error else ""
        words = (self.why, "not finite" if self.error == inf else off)
        return ": ".join([self.verdict, ", ".join(filter(None, words))]).rstrip(": ")


class WrongError(Exception):
    """A result has the wrong type, shape or dtype."""


def accepts(target: Callable[..., Any]) -> dict[str, bool]:
    """By name of a keyword argument that the audited function takes, whether it has no default; {} if unknown."""
    try:
        return {name: one.default is one.empty for name, one in inspect.signature(target).parameters.items()}
    except ValueError:
        return {}


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
    out. With a decay, weights are scores times its power of the distance, as in a recurrent layer.
    """
    group, seen, decay = case.heads // case.kv_heads, see(case).to(q.device), case.mask.get("decay")
    scores = q @ k.repeat_interleave(group, 1).mT * (case.mask.get("scale") or case.head_dim**-0.5)
    if cap := case.mask.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    logits = scores.masked_fill(~seen, float("-inf"))
    if case.mask.get("sink_logits"):
        sinks = torch.linspace(-1.0, 1.0, case.heads, device="cpu").to(q)[:, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    lse = logits.logsumexp(-1)
    if kernel is not None:
        sign = 1 - 2 * (torch.arange(lse.shape[2], device=lse.device) % 2)
        lse = lse + sign * torch.finfo(torch.float32).eps * scores.detach().abs().masked_fill(~seen, 0.0).amax(-1)
    weights = (logits - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()[..., : k.shape[2]]
    if decay is not None:
        place = torch.arange(case.tokens, device=q.device)
        weights = (scores * decay ** (place[:, None] - place).clamp(min=0).to(q)).masked_fill(~seen, 0.0)
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
    name: str, ours: Tensor, exact: Tensor, allowed: tuple[float, float], rows: Tensor | None, scale: float,
    ratio: float = 1.0,
) -> Verdict:  # fmt: skip
    """Compare one tensor with the exact one. `allowed` is from `find_tolerance`.

    The verdict is "exact" for errors of `ratio` times what is allowed, "rounded" for larger ones, or "wrong". `rows`
    are the positions along the third dim, with which the verdict names wrong rows.
    """
    away = (ours.double().cpu() - exact).abs().masked_fill(~exact.isfinite(), 0.0).nan_to_num(nan=inf, posinf=inf)
    error, mean = float(away.max()) / scale if away.numel() else 0.0, _mean(away) / scale
    for verdict, part in (("exact", ratio), ("rounded", 1.0)):
        if error <= allowed[0] * part and mean <= allowed[1] * part:
            why = "" if verdict == "exact" else f"{name} is computed in fp32"
            return Verdict(verdict, why, name, error, allowed[0] * part)
    if rows is None:
        return Verdict("wrong", name, name, error, allowed[0] * ratio)
    wrong = rows[away.amax([i for i in range(away.dim()) if i != 2]) > allowed[0] * ratio * scale].tolist()
    if not wrong:
        return Verdict("wrong", f"{name} as a whole, its mean square", name, mean, allowed[1] * ratio)
    spelled = f"{wrong[0]} .. {wrong[-1]} ({len(wrong)})" if len(wrong) > 1 else str(wrong[0])
    return Verdict("wrong", f"{name} of rows {spelled}", name, error, allowed[0] * ratio)


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
    world = dist.get_world_size()
    groups = [dist.new_group([*ranks]) for ranks in case.groups] or [dist.group.WORLD]
    for number, (ranks, group) in enumerate(zip(case.groups or (range(world),), groups, strict=True)):
        if dist.get_rank() in ranks:
            return _Attempt(target, replace(case, tokens=case.tokens * len(ranks) // world), device, group, number).run
    return lambda: Verdict("exact", tolerance=1.0)  # this rank is in no group


class _Attempt:
    """A case on this rank, in the group of a number."""

    def __init__(self, target: Callable[..., Any], case: Case, device: torch.device, group: Any, number: int) -> None:
        self.target, self.case, self.device, self.group = target, case, device, group
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.prompt, self.cache = case.tokens - (case.calls - 1 if "cache" in case.ways else 0), dict[Any, Any]()
        self.row_sets = [place_rows(target, self.prompt, i, ranks) for i in range(ranks)]
        self.rows, self.key_rows = self.row_sets[rank], place_rows(target, case.keys or self.prompt, rank, ranks)
        self.given = torch.float64 if "differ" in case.ways and rank == 1 else self.dtype
        # The exact result has fp64 itself: what a call in fp64 may err follows from the error of one in fp32.
        self.ruler = torch.float32 if self.dtype == torch.float64 else self.dtype
        different = 1 if "cache" in case.ways else min(case.calls, DISTINCT)
        self.problems = [make_inputs(case, call, number) for call in range(different)]
        known = "differ" not in case.ways and not case.mask.get("dropout")
        self.answers = [self.answer(inputs) for inputs in self.problems] if known else []

    def answer(self, inputs: Sequence[Tensor], keep: Tensor | None = None) -> dict[str, Any]:
        """By tensor: (the exact one, the tolerance of a call in the ruler's dtype, the scale of both)."""
        exact, alone, answer = solve(self.case, inputs, keep=keep), solve(self.case, inputs, self.ruler, keep), {}
        for name, right in exact.items():
            scale = float(_finite(right).abs().max()) if right.numel() else 0.0
            kind = torch.float32 if name == "lse" else self.ruler
            answer[name] = right, find_tolerance(alone[name], right, kind, scale or 1.0), scale or 1.0
        return answer

    def prepare_call(self) -> Callable[..., tuple[Any, Any]]:
        """The call of the target with the case's keywords; returns (out, lse or None)."""
        case, rows = self.case, self.rows
        keywords = {name: value for name, value in case.mask.items() if name not in ("sink_logits", "padding", "left")}
        if "padding_mask" in case.needs:
            keywords["padding_mask"] = (~case.is_real(rows)).expand(case.batch, -1).to(self.device)
        if case.mask.get("sink_logits"):
            keywords["sink_logits"] = torch.linspace(-1.0, 1.0, case.heads, device="cpu").to(self.device)
        if "lse" in case.ways:
            keywords["return_lse"] = True
        if "bits" in case.ways and "same_bits" in accepts(self.target):
            keywords["same_bits"] = True
        if "cache" in case.ways:
            keywords["cache"] = self.cache

        def attend(*qkv: Tensor) -> tuple[Any, Any]:
            result = self.target(*qkv, group=self.group, **keywords)
            if isinstance(result, tuple) and len(result) != 2:
                raise WrongError(f"the target returned {len(result)} values, not out or (out, lse)")
            return result if isinstance(result, tuple) else (result, None)

        if "compile" in case.ways:
            set_lock = getattr(vars(torch.hub)["tqdm"], "set_lock", None)
            if set_lock is not None:
                set_lock(RLock())  # the default is a semaphore between processes, which would outlive this one
            from torch._dynamo.backends.debugging import aot_eager  # by name, torch imports every backend there is

            return torch.compile(attend, backend=aot_eager)
        if "checkpoint" in case.ways:
            return lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False)
        return attend

    def run(self) -> Verdict:
        """Make all calls of the case; returns the worst verdict. No rank leaves early, as others would wait for it."""
        case, call, verdicts = self.case, self.prepare_call(), list[Verdict]()
        trials = [self.attempt(call, turn) for turn in range(case.calls)]
        if "crossed" in case.ways:
            for trial in trials:
                next(trial)
        for turn, trial in enumerate(trials):
            verdicts += [one for one in trial if one is not None]
            if turn == WARM:
                gc.freeze()  # what is alive now is not looked at
        worst, more, kept = choose(verdicts), case.calls - WARM, 0
        if more > 0:
            gc.collect()
            kept = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
            gc.unfreeze()
        if kept > more / 2 > 0 and worst.verdict != "wrong":
            return Verdict("wrong", f"{more} calls kept {kept} tensors alive", "memory")
        if worst.verdict != "wrong" or case.calls == 1:
            return worst
        return replace(worst, why=f"{worst.why}, in call {verdicts.index(worst) + 1} of {case.calls}")

    def attempt(self, call: Callable[..., tuple[Any, Any]], turn: int) -> Iterator[Verdict | None]:
        """Call the target with the inputs of this turn; yields None, and after the backward the verdict."""
        case, ways, grads_on = self.case, self.case.ways, "no_grad" not in self.case.ways
        number, rows, key_rows = turn % len(self.problems), self.rows, self.key_rows
        if "cache" in ways and turn:  # one token, the same on all ranks
            rows = key_rows = torch.tensor([self.prompt + turn - 1], device="cpu")
        q, k, v, grad, grad_lse = self.problems[number]
        made = [q[:, :, rows], *(x[:, :, key_rows] for x in (k, v)), grad[:, :, rows]]
        passed = [x.to(self.given).to(self.device) for x in (*made, grad_lse[:, :, rows])]
        if "strided" in ways:
            passed = [torch.stack([x, x], -1)[..., 0] for x in passed]
        copies = [x.clone() for x in passed]
        for i, x in enumerate(passed[:3]):
            x.requires_grad_(grads_on and not ("no_dk" in ways and i == 1))
        with torch.set_grad_enabled(grads_on):
            out, lse = call(*passed[:3])
        yield None
        if "differ" in ways:
            yield Verdict("wrong", "no rank raised an error, although rank 1 has another dtype", "out")
            return
        check_tensor("out", out, (*made[0].shape[:3], v.shape[3]), self.dtype)
        found = {"out": out.detach()}
        if "lse" in ways:
            check_tensor("lse", lse, out.shape[:3])
            found["lse"] = lse.detach()
        if wanted := {f"d{name}": x for name, x in zip("qkv", passed[:3], strict=True) if x.requires_grad}:
            ends = [out], [passed[3]]
            if "dlse" in ways:
                if not lse.requires_grad:
                    yield Verdict("not offered", "its log-sum-exp has no gradient")
                    return
                ends = [out, lse], [passed[3], passed[4].to(lse.dtype)]
            for again in (True, False) if "twice" in ways else (False,):
                grads = torch.autograd.grad(ends[0], [*wanted.values()], ends[1], retain_graph=again)
            found |= dict(zip(wanted, grads, strict=True))
        keep = self.find_dropped(out) if case.mask.get("dropout") else None
        answer = self.answers[number] if keep is None else self.answer(self.problems[number], keep)
        named = zip(("q", "k", "v", "the gradient of out"), passed, copies, strict=False)
        changed = [name for name, x, copy in named if not torch.equal(x, copy)]
        verdicts = [Verdict("wrong", f"{name} was changed by the call", name) for name in changed]
        for name, ours in found.items():
            verdicts.append(self.check(name, ours, key_rows if name in ("dk", "dv") else rows, *answer[name]))
        yield choose(verdicts)

    def check(
        self, name: str, ours: Tensor, rows: Tensor, exact: Tensor, allowed: tuple[float, float], scale: float
    ) -> Verdict:
        """The verdict on one tensor of this rank."""
        if name in ("out", "lse"):  # what rows of padding return does not matter, as their cotangent is 0
            real = self.case.is_real(rows)
            ours, rows = ours[:, :, real.to(ours.device)], rows[real]
        ratio = 1.0 if name == "lse" else torch.finfo(self.dtype).eps / torch.finfo(self.ruler).eps
        return check(name, ours, exact[:, :, rows], allowed, rows, scale, ratio)

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
    """Keeps the results of all ranks, by name, in `bits`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.bits: dict[str, Tensor] = {}

    def check(
        self, name: str, ours: Tensor, rows: Tensor, exact: Tensor, allowed: tuple[float, float], scale: float
    ) -> Verdict:
        whole = torch.zeros(*ours.shape[:2], exact.shape[2], *ours.shape[3:], dtype=ours.dtype, device=ours.device)
        whole[:, :, rows.to(ours.device)] = ours
        dist.all_reduce(whole.view(torch.uint8), group=self.group)
        self.bits[name] = whole
        return super().check(name, ours, rows, exact, allowed, scale)


def _prepare_bits(target: Callable[..., Any], case: Case, device: torch.device) -> Callable[[], Verdict]:
    """`prepare` for groups of one rank, two ranks, and so on up to four, which all get the same whole inputs.

    Other bits are wrong if the target has an argument `same_bits`, which promises them; else the verdict is "rounded".
    """
    trials, rank = dict[int, _BitsAttempt](), dist.get_rank()
    for many in range(1, min(dist.get_world_size(), 4) + 1):
        group = dist.new_group([*range(many)])
        if rank < many:
            trials[many] = _BitsAttempt(target, case, device, group, 0)

    def compare() -> Verdict:
        promised, verdicts = "same_bits" in accepts(target), [Verdict("exact", tolerance=1.0)]
        first: dict[str, Tensor] | None = None  # the results of the smallest number of ranks that has some
        for many, trial in trials.items():  # ranks of smaller groups go on as well, for those of larger ones
            one = judge(trial.run)
            if one.verdict in ("refused", "crash") and not promised:
                one = Verdict("not offered", f"on {many} ranks: {one.why}")
            verdicts.append(one)
            if rank or one.verdict in ("not offered", "refused", "crash"):
                continue  # rank 0 alone is in all groups
            first = trial.bits if first is None else first
            for name, bits in trial.bits.items():
                if not torch.equal(bits.view(torch.uint8), first[name].view(torch.uint8)):
                    why = f"{name} has other bits on {many} ranks than on fewer"
                    verdicts.append(Verdict("wrong" if promised else "rounded", why, name))
        return choose(verdicts)

    return compare


def run_script(prepare: Callable[..., Any], case: Case, ranks: int, backend: str, seconds: float = 600.0) -> None:
    """Try a case on new ranks, and end this process as `git bisect run` expects.

    The status is 0 if the case is right, 1 if it is wrong, crashes or has no result in so many seconds, and 125 if the
    target cannot be imported, or refuses the case. `prepare` imports it, and returns what compares, for (case, device).
    """
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True  # the next commit may have the same time and size
    how, end = "fork" if backend == "gloo" and hasattr(os, "fork") else "spawn", monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        given = (prepare, case, ranks, backend, f"file://{folder}/meeting")
        context: Any = start_processes(_try, given, ranks, join=False, start_method=how)
        try:
            while not context.join(1.0):
                if monotonic() > end:
                    raise ProcessExitedException("no result", 0, context.pids()[0], 1)
        except ProcessExitedException as error:
            for process in context.processes:
                process.kill()
            sys.exit(125 if error.exit_code == 125 else 1)


def _try(rank: int, prepare: Callable[..., Any], case: Case, ranks: int, backend: str, meeting: str) -> None:
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    try:
        verdict = judge(prepare(case, device))
    except ImportError as error:
        verdict = Verdict("refused", first_words(error))
    sys.stdout.write(f"rank {rank}: {verdict.told}\n")
    sys.stdout.flush()
    # Gloo's threads may hold tensors while Python ends, which aborts.
    os._exit({"exact": 0, "rounded": 0, "refused": 125, "not offered": 125}.get(verdict.verdict, 1))
