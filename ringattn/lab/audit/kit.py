"""One case of an audit, with torch alone: its inputs, its exact results, how far a right one may be off, and a verdict.

The script of a failure contains this file, so that it tries what the audit tried: nothing else of the library may be
imported here.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf, nan
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
#: An exact tensor, the largest error and mean square to accept, and the scale of both.
Answer = tuple[Tensor, tuple[float, float], float]
#: Verdicts, the worst last, and those that make an audit fail.
VERDICTS = ("exact", "not offered", "refused", "rounded", "too slow", "crash", "hang", "wrong")
FAILURES = ("wrong", "hang", "crash", "too slow")
#: A result may be this many times as wrong as one of a kernel on one device that accumulates in fp32, and at least this
#: many rounding errors. In 16 bits the rounding of the result is most of that, so that less is needed; ranks may round
#: what they add.
TIMES, TIMES_16, ROUNDING, ROUNDING_16 = 8.0, 4.0, 32.0, 1.0
#: The fewest entries of a tensor whose mean error is known well enough to judge.
ENOUGH = 256
#: Different problems of a case that calls more often; and the calls after which no call may keep another tensor.
DISTINCT, WARM = 4, 50
#: The parts of a mask that are numbers of tokens; these and other numbers change from call to call.
NUMBERS = ("window", "padding", "left", "sinks")
VARIED = (*NUMBERS, "scale", "softcap")
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
    checkpoint, compile, offered (without keywords that the target has not), differ (rank 1 has another dtype), cache
    (the first call has a prompt, each later one the next token), and bits (1 to 4 ranks give the same bits).
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

    def keywords(self, rows: Tensor, cache: Any = None) -> dict[str, Any]:
        """The keyword arguments that this case passes to the audited function."""
        given = {name: value for name, value in self.mask.items() if name not in ("padding", "left")}
        if len(given) < len(self.mask):
            given["padding_mask"] = ~self.is_real(rows)
        if "sink_logits" in given:
            given["sink_logits"] = torch.linspace(-1.0, 1.0, self.heads, device="cpu")
        options = (("lse", "return_lse", True), ("cache", "cache", cache))
        return given | {name: value for way, name, value in options if way in self.ways}

    @property
    def ruler(self) -> torch.dtype:
        """The dtype that tolerances are for: in fp64, of which the exact result is, that of a call in fp32."""
        return torch.float32 if self.dtype == "float64" else getattr(torch, self.dtype)

    @property
    def different(self) -> int:
        """How many problems the calls have in turn."""
        return 1 if "cache" in self.ways else min(self.calls, DISTINCT)

    def __hash__(self) -> int:
        return hash(repr(self))

    def pose(self, call: int, number: int) -> tuple[Case, list[Tensor], dict[str, Answer]]:
        """The problem of a call of a group, see `split`; features with the same one share it."""
        ways = tuple(way for way in self.ways if way in ("large", "shared", "strided", "dlse", "differ"))
        return _pose(replace(self, feature="", ways=ways, calls=1, groups=()), call, number)

    def at(self, call: int) -> Case:
        """The case of a call: every second one has documents in reverse order, and other numbers in its mask."""
        other = {name: value + 1 for name, value in self.mask.items() if name in VARIED}
        if "documents" in self.mask:
            other["documents"] = self.mask["documents"][::-1]
        return replace(self, mask={**self.mask, **other}) if call % 2 else self

    def ends(self, row: int) -> tuple[int, int]:
        """(first, end) of the tokens of a row of the batch that are not padding; each row has more."""
        return self.mask.get("left", 0) * (row + 1), self.tokens - self.mask.get("padding", 0) * (row + 1)

    def is_real(self, rows: Tensor) -> Tensor:
        """bool [B, rows]: for token indices `rows`, whether each is not padding."""
        ends = [self.ends(row) for row in range(self.batch)]
        return torch.stack([(rows >= first) & (rows < end) for first, end in ends])

    def split(self, world: int) -> list[tuple[Sequence[int], int, Case]]:
        """(ranks, number, case) of each process group; groups of one number have the same inputs."""
        if "bits" in self.ways:
            return [(range(many), 0, self) for many in range(1, min(world, 4) + 1)]
        groups = [*enumerate(self.groups or (range(world),))]
        return [(ranks, i, replace(self, tokens=self.tokens * len(ranks) // world)) for i, ranks in groups]


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
    """bool [B or 1, 1, tokens, keys]: which keys (columns) each query (row) attends."""
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
    return seen[None, None] if case.keys else seen & case.is_real(place)[:, None, None]


def make_inputs(case: Case, call: int = 0, group: int = 0) -> list[Tensor]:
    """q, k, v and the gradients of out and lse for the whole sequence, in fp64, rounded to the dtype of the case.

    Each call of each group has its own. With dropout, v is the unit matrix, so that out contains every attention
    weight. The gradients are 0 for padding.
    """
    source = torch.Generator().manual_seed(zlib.crc32(f"{call} {group}".encode()))
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
    if "strided" in case.ways:
        grad[:] = grad[..., :1]
    if case.mask.get("dropout"):
        v = torch.eye(case.tokens, **made).expand(v.shape).clone()
    padding = ~case.is_real(torch.arange(case.tokens, device="cpu"))[:, None]
    inputs = (q, k, v, grad.masked_fill(padding[..., None], 0.0), grad_lse.masked_fill(padding, 0.0))
    return [x.to(getattr(torch, case.dtype)).double() for x in inputs]


def solve(
    case: Case, inputs: Sequence[Tensor], dtype: torch.dtype = torch.float64, keep: Tensor | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of dense attention, as fp64: exact ones, or as a kernel of another dtype errs.

    Rows that see no key have out 0. `keep` [B, H, N, N] is 1 / (1 - p) for weights that dropout kept, and 0 for dropped
    ones. A kernel accumulates in fp32; it errs by a rounding of the largest logit in the log-sum-exp that it merges and
    stores, and in 16 bits by those of weights, gradients of scores, and results. With `decay`, a number, weights are
    scores times its power of the distance, as in a recurrent layer; with `taps`, the tap of the distance, as in a
    convolution.
    """
    exact, mask, seen, share = dtype == torch.float64, case.mask, see(case), case.heads // case.kv_heads
    q, k, v, grad, grad_lse = (x if exact else x.float() for x in inputs)
    keys, values = (x.repeat_interleave(share, 1) for x in (k, v))
    scale, slope = mask.get("scale") or case.head_dim**-0.5, torch.ones((), dtype=q.dtype, device="cpu")
    scores = q @ keys.mT * scale
    if cap := mask.get("softcap"):
        bent = torch.tanh(scores / cap)
        scores, slope = cap * bent, 1 - bent**2
    logits = scores.masked_fill(~seen, -inf)
    if mask.get("sink_logits"):
        sinks = torch.linspace(-1.0, 1.0, case.heads, device="cpu").to(q)[:, None, None].expand(*scores.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    lse = logits.logsumexp(-1)
    if not exact:
        sign = 1 - 2 * (torch.arange(lse.shape[2], device="cpu") % 2)
        lse = lse + sign * torch.finfo(torch.float32).eps * scores.abs().masked_fill(~seen, 0.0).amax(-1)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(x) if dtype.itemsize == 2 else x

    weights = (logits[..., : k.shape[2]] - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    dropped = torch.ones_like(slope) if keep is None else keep.to(q)
    if "decay" in mask or "taps" in mask:
        place = torch.arange(case.tokens, device="cpu")
        distance = (place[:, None] - place).clamp(min=0)
        by = [mask["decay"] ** i for i in place] if "decay" in mask else [*mask["taps"], *[0.0] * case.tokens]
        factors = torch.tensor(by, dtype=q.dtype, device="cpu")[distance] * seen
        weights = scores * factors if "decay" in mask else factors.expand_as(scores)
    used = rounded(weights * dropped)
    out = rounded(used @ values)
    slopes = grad @ values.mT * dropped
    if "decay" in mask or "taps" in mask:
        slopes = slopes * factors * ("decay" in mask)
    else:
        more = grad_lse[..., None] if "dlse" in case.ways else 0.0
        slopes = weights * (slopes - (grad * out).sum(-1, keepdim=True) + more)
    slopes = rounded(slopes) * slope * scale
    found = {"out": out, "dq": slopes @ keys, "dk": slopes.mT @ q, "dv": used.mT @ grad}
    found |= {name: found[name].unflatten(1, (-1, share)).sum(2) for name in ("dk", "dv")}
    return {name: x.double() for name, x in {**{name: rounded(x) for name, x in found.items()}, "lse": lse}.items()}


@lru_cache(512)
def _pose(case: Case, call: int, group: int) -> tuple[Case, list[Tensor], dict[str, Answer]]:
    case = case.at(call)
    inputs, unknown = make_inputs(case, call, group), "differ" in case.ways or bool(case.mask.get("dropout"))
    return case, inputs, {} if unknown else compare_dtypes(case, inputs)


def compare_dtypes(case: Case, inputs: Sequence[Tensor], keep: Tensor | None = None) -> dict[str, Answer]:
    """By tensor: the exact one, the tolerance of a call in the ruler's dtype, and the scale of both."""
    exact, alone, answer = solve(case, inputs, keep=keep), solve(case, inputs, case.ruler, keep), dict[str, Answer]()
    padding = ~case.is_real(torch.arange(case.tokens, device="cpu"))[:, None]
    exact["lse"].masked_fill_(padding, nan)  # what rows of padding return does not matter, as their cotangent is 0
    exact["out"].masked_fill_(padding[..., None], nan)
    for name, right in exact.items():
        scale = (float(_finite(right).abs().max()) if right.numel() else 0.0) or 1.0
        kind = torch.float32 if name == "lse" else case.ruler
        times = TIMES if "large" in case.ways else 0.0  # few weights count, so that few roundings average out
        answer[name] = right, find_tolerance(alone[name], right, kind, scale, times), scale
    return answer


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


def check(name: str, ours: Tensor, answer: Answer, rows: Tensor | None = None, ratio: float = 1.0) -> Verdict:
    """Compare one tensor with the exact one, or `rows` of it along the third dim, by finite entries.

    The verdict is "exact" for errors of `ratio` times what is allowed, "rounded" for larger ones, or "wrong".
    """
    exact, allowed, scale = answer[0] if rows is None else answer[0][:, :, rows], *answer[1:]
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
    """Make the groups and exact results of a case; returns a function that calls the target and compares. Collective.

    Every call has other inputs, and the gradient of the output is random.
    """
    trials = list[Attempt]()
    for ranks, number, part in case.split(dist.get_world_size()):
        group = dist.new_group([*ranks]) if case.groups or "bits" in case.ways else dist.group.WORLD
        if dist.get_rank() in ranks:
            trials.append(Attempt(target, part, device, group, number))
    if "bits" in case.ways:
        return lambda: _compare_bits(trials, "same_bits" in accepts(target))
    return trials[0].run if trials else lambda: Verdict("exact", tolerance=1.0)  # this rank is in no group


class Attempt:
    """A case on this rank, in the group of a number."""

    def __init__(self, target: Callable[..., Any], case: Case, device: torch.device, group: Any, number: int) -> None:
        self.target, self.case, self.device, self.group = target, case, device, group
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.prompt, self.cache = case.tokens - (case.calls - 1 if "cache" in case.ways else 0), dict[Any, Any]()
        self.row_sets = [place_rows(target, self.prompt, i, self.ranks) for i in range(self.ranks)]
        self.rows, self.key_rows = self.row_sets[rank], place_rows(target, case.keys or self.prompt, rank, self.ranks)
        self.given = torch.float64 if "differ" in case.ways and rank == 1 else self.dtype
        self.problems = [case.pose(call, number) for call in range(case.different)]
        #: By problem: what its first call returned, and the verdict on it. By call: which weights dropout kept.
        self.known, self.kept = dict[int, tuple[dict[str, Tensor], Verdict]](), list[Tensor]()

    def wrap(self) -> Callable[..., Any]:
        """The target in the group, perhaps compiled or in a checkpoint."""

        def attend(*qkv: Tensor, **given: Any) -> Any:
            return self.target(*qkv, group=self.group, **promise, **given)

        promise = {"same_bits": True} if "bits" in self.case.ways and "same_bits" in accepts(self.target) else {}

        if "compile" in self.case.ways:
            set_lock = getattr(vars(torch.hub)["tqdm"], "set_lock", None)
            if set_lock is not None:
                set_lock(RLock())  # the default is a semaphore between processes, which would outlive this one
            from torch._dynamo.backends.debugging import aot_eager  # by name, torch imports every backend there is

            return torch.compile(attend, backend=aot_eager)
        return partial(checkpoint, attend, use_reentrant=False) if "checkpoint" in self.case.ways else attend

    def run(self) -> Verdict:
        """Make all calls of the case; returns the worst verdict. No rank leaves early, as others would wait for it."""
        case, call, verdicts = self.case, self.wrap(), list[Verdict]()
        trials = [self.attempt(call, turn) for turn in range(case.calls)]
        # A forward, a backward, a comparison, and the end. A few calls are compared after the last one, which may have
        # overwritten what they returned.
        for stages in (1, 1, 2) if "crossed" in case.ways else (4,) if case.calls > WARM else (2, 2):
            for turn, trial in enumerate(trials):
                verdicts += [one for _ in range(stages) if (one := next(trial, None)) is not None]
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

    def attempt(self, call: Callable[..., Any], turn: int) -> Iterator[Verdict | None]:
        """Call the target with the inputs of a turn; yields None after forward and backward, and then the verdict."""
        number, ways, rows, key_rows = turn % len(self.problems), self.case.ways, self.rows, self.key_rows
        if "cache" in ways and turn:  # one token, the same on all ranks
            rows = key_rows = torch.tensor([self.prompt + turn - 1], device="cpu")
        case, (q, k, v, grad, grad_lse), answers = self.problems[number]
        made = [q[:, :, rows], *(x[:, :, key_rows] for x in (k, v)), grad[:, :, rows], grad_lse[:, :, rows]]
        passed = [x.to(self.given).to(self.device) for x in made]
        if "strided" in ways and turn % 2:  # as of a projection
            passed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in passed]
        elif "strided" in ways:
            passed = [torch.stack([x, x], -1)[..., 0] for x in passed]
            passed[3] = passed[3][..., :1].expand_as(passed[3])  # as of a sum
        copies, grads_on = [x.clone() for x in passed], "no_grad" not in ways
        for i, x in enumerate(passed[:3]):
            x.requires_grad_(grads_on and not ("no_dk" in ways and i == 1))
        given = self.case.at(number).keywords(self.rows, self.cache)
        given = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in given.items()}
        with torch.set_grad_enabled(grads_on):
            result = call(*passed[:3], **given)
        yield None
        if "differ" in ways:
            yield Verdict("wrong", "no rank raised an error, although rank 1 has another dtype", "out")
            return
        if isinstance(result, tuple) and len(result) != 2:
            raise WrongError(f"the target returned {len(result)} values, not out or (out, lse)")
        out, lse = result if isinstance(result, tuple) else (result, None)
        check_tensor("out", out, (*made[0].shape[:3], v.shape[3]), self.dtype)
        found = {"out": out.detach()}
        if "lse" in ways:
            check_tensor("lse", lse, out.shape[:3])
            found["lse"] = lse.detach()
        if "dlse" in ways and not lse.requires_grad:
            yield Verdict("not offered", "its log-sum-exp has no gradient")
            return
        ends = {out: passed[3], lse: passed[4].to(lse.dtype)} if "dlse" in ways else {out: passed[3]}
        found |= self.differentiate({f"d{name}": x for name, x in zip("qkv", passed[:3], strict=True)}, ends)
        yield None
        named = zip(("q", "k", "v", "the gradient of out"), passed, copies, strict=False)
        changed = [Verdict("wrong", f"{name} was changed", name) for name, x, old in named if not torch.equal(x, old)]
        first, verdict = self.known.get(number, ({}, None))
        if verdict is None or any(not torch.equal(x, first[name]) for name, x in found.items()):
            if case.mask.get("dropout"):
                answers = compare_dtypes(case, self.problems[number][1], self.find_dropped(case, out))
            places = {name: key_rows if name in ("dk", "dv") else rows for name in found}
            part = torch.finfo(self.dtype).eps / torch.finfo(case.ruler).eps
            parts = {name: 1.0 if name == "lse" else part for name in found}
            verdict = choose([check(name, x, answers[name], places[name], parts[name]) for name, x in found.items()])
        if "cache" not in ways:
            self.known.setdefault(number, ({name: x.clone() for name, x in found.items()}, verdict))
        yield choose([*changed, verdict])

    def differentiate(self, leaves: dict[str, Tensor], ends: dict[Tensor, Tensor]) -> dict[str, Tensor]:
        """The gradients of those leaves that need one, from results with their gradients, by one or two backwards."""
        wanted, grads = {name: x for name, x in leaves.items() if x.requires_grad}, tuple[Tensor, ...]()
        unused: dict[str, Any] = dict.fromkeys(("allow_unused", "materialize_grads"), "taps" in self.case.mask)
        for again in (True, False) if "twice" in self.case.ways else (False,):
            if wanted:
                given = [*ends], [*wanted.values()], [*ends.values()]
                grads = torch.autograd.grad(*given, retain_graph=again, **unused)
        return dict(zip(wanted, grads, strict=True))

    def find_dropped(self, case: Case, out: Tensor) -> Tensor:
        """1 / (1 - p) for each weight that dropout kept, [B, H, N, N]: the outputs of all ranks show them."""
        whole, sets = self.gather(out, self.rows, case.tokens), self.row_sets
        seen, shown, share = see(case)[0, 0], whole.cpu(), 1 - case.mask["dropout"]
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
        self.kept.append(kept)
        if len(self.kept) > 1 and torch.equal(*self.kept[-2:]):
            raise WrongError("two calls drop the same weights")
        return kept.double() / share

    def gather(self, x: Tensor, rows: Tensor, tokens: int) -> Tensor:
        """The rows of all ranks of the group, [B, H, tokens, ...], with their bits. Collective."""
        whole = torch.zeros(*x.shape[:2], tokens, *x.shape[3:], dtype=x.dtype, device=x.device)
        whole[:, :, rows.to(x.device)] = x.detach()
        dist.all_reduce(whole.view(torch.uint8), group=self.group)
        return whole


def _compare_bits(trials: Sequence[Attempt], promised: bool) -> Verdict:
    """The verdict on groups of one rank, two ranks, and so on up to four, which all have the same whole inputs.

    Other bits are wrong if the target has an argument `same_bits`, which promises them; else the verdict is "rounded".
    """
    verdicts, first = [Verdict("exact", tolerance=1.0)], dict[str, Tensor]()
    for trial in trials:  # ranks of smaller groups go on as well, for those of larger ones
        one = judge(trial.run)
        if one.verdict in ("refused", "crash") and not promised:
            one = Verdict("not offered", f"on {trial.ranks} ranks: {one.why}")
        verdicts.append(one)
        for name, x in trial.known[0][0].items() if trial.known else ():
            bits = trial.gather(x, trial.key_rows if name in ("dk", "dv") else trial.rows, trial.case.tokens)
            # Rank 0 alone is in all groups; the first has the smallest number of ranks that gave a result.
            other = [y.view(torch.uint8) for y in (bits, first.setdefault(name, bits))]
            if not dist.get_rank() and not torch.equal(*other):
                why = f"{name} has other bits on {trial.ranks} ranks than on fewer"
                verdicts.append(Verdict("wrong" if promised else "rounded", why, name))
    return choose(verdicts)


def run_script(prepare: Callable[..., Any], case: Case, ranks: int, backend: str) -> None:
    """Try a case on new ranks, and end this process as `git bisect run` expects.

    The status is 0 if the case is right, 1 if it is wrong, crashes or has no result in 600 s, and 125 if the target
    cannot be imported, or refuses the case. `prepare` imports it, and returns what compares, for (case, device).
    """
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True  # the next commit may have the same time and size
    how = "fork" if backend == "gloo" and hasattr(os, "fork") else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_try, (prepare, case, ranks, backend, f"file://{folder}/meeting"), ranks, start_method=how)
        except ProcessExitedException as error:  # of the first rank that ended with another status than 0
            sys.exit(125 if error.exit_code == 125 else 1)


def _try(rank: int, prepare: Callable[..., Any], case: Case, ranks: int, backend: str, meeting: str) -> None:
    signal.alarm(600)
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
