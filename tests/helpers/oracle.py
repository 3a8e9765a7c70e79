"""The oracle: dense attention in fp64 under a pattern's mask, by autograd; and one call of a single device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ringattn.kernels.base import Kernel, band, wide
from ringattn.kernels.softmax import merge_
from ringattn.pattern import Pattern
from ringattn.plan.work import Work

Tensor = torch.Tensor


@dataclass(frozen=True)
class Result:
    """out, lse, and the gradients of sum(out * cotangent) + sum(lse * lse_cotangent)."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Inputs of one attention and the cotangents of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    grad_lse: Tensor | None = None
    scale: float | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return tuple(x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in self.inputs)

    @property
    def factor(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale


def make_case(
    tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, *, batch: int = 2, dim: int = 16,
    value_dim: int | None = None, lse: bool = False, seed: int = 0,
) -> Case:  # fmt: skip
    """Random normal inputs and cotangents, the same for every dtype up to rounding."""
    source = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim), (heads, value_dim or dim))
    q, k, v, grad = (
        torch.randn(batch, h, tokens, d, generator=source, dtype=torch.float64).to(dtype) for h, d in shapes
    )
    grad_lse = torch.randn(batch, heads, tokens, generator=source, dtype=torch.float64)
    return Case(q, k, v, grad, grad_lse if lse else None)


def dense(
    case: Case, mask: Tensor, output_scale: float = 1.0, *, softcap: float | None = None, sinks: Tensor | None = None,
    factors: Tensor | float = 1.0,
) -> Result:  # fmt: skip
    """fp64 softmax with multiplicities `mask` [H, N, N] or [B, H, N, N]; rows that see no key are 0, their lse -inf.

    sinks [H]: logits of one more key each, whose gradient is then the last. factors: of the weights, by dropout.
    """
    leaves = [*case.leaves(torch.float64)]
    q, k, v = leaves
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * case.factor
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + mask.double().log()
    if sinks is not None:
        leaves.append(sinks.detach().double().requires_grad_())
        scores = torch.cat([scores, leaves[-1][:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)  # finite here, struck out below
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(empty, 0.0)[..., : k.shape[2]] * factors
    out = weights @ v.repeat_interleave(group, 1) * output_scale
    loss = (out * case.grad.double()).sum()
    if case.grad_lse is not None:
        loss = loss + (lse * ~empty.squeeze(-1) * case.grad_lse).sum()
    shown = lse.detach().masked_fill(empty.squeeze(-1), -torch.inf)
    return Result(out.detach(), shown, torch.autograd.grad(loss, leaves))


def single_device(case: Case, mask: Tensor, output_scale: float = 1.0) -> Result:
    """One call of torch's SDPA in the dtype of the case, with the same mask: the error that nobody can blame us for."""
    q, k, v = case.leaves()
    seen = (mask.sum(-1) > 0).unsqueeze(-1)
    bias = mask.double().log().where(seen, torch.zeros((), dtype=torch.float64)).to(q.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1), scale=case.factor, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out * seen * output_scale
    return Result(out.detach(), torch.empty(0), torch.autograd.grad(out, (q, k, v), case.grad))


def stored(case: Case, mask: Tensor, output_scale: float = 1.0) -> Result:
    """Exact arithmetic, but for the output that every implementation stores in the dtype of the case and whose
    rounding its backward reads (delta = rowsum(dO * O)): what a call in that dtype can reach at best."""
    q, k, v = case.leaves(torch.float64)
    group = q.shape[1] // k.shape[1]
    seen = (mask.sum(-1) > 0).unsqueeze(-1)
    bias = mask.double().log().where(seen, torch.zeros((), dtype=torch.float64))
    scores = q @ k.repeat_interleave(group, 1).mT * case.factor + bias
    weights = scores.softmax(-1) * seen
    out = (weights @ v.repeat_interleave(group, 1)).to(case.grad.dtype)
    grad = case.grad.double() * output_scale
    inner = grad @ v.repeat_interleave(group, 1).mT - (grad * out.double()).sum(-1, keepdim=True)
    inner = weights * inner * case.factor
    dq, dk, dv = inner @ k.repeat_interleave(group, 1), inner.mT @ q, weights.mT @ grad
    grads = (dq, *(x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv)))
    return Result(
        (out.double() * output_scale).to(case.grad.dtype), torch.empty(0),
        tuple(x.detach().to(case.grad.dtype) for x in grads),
    )  # fmt: skip


def error(found: Tensor, truth: Tensor) -> float:
    """Largest absolute error, relative to the largest entry of the truth (1 where all are smaller than 1)."""
    if not truth.numel():
        assert found.shape == truth.shape
        return 0.0
    found, truth = found.detach(), truth.detach()
    assert not found.isnan().any()
    return float((found.double() - truth).abs().max() / truth.abs().max().clamp(min=1.0))


def errors(found: Result, truth: Result) -> list[float]:
    """Errors of out, dq, dk, dv, and of the gradient of the sinks if there are sinks."""
    pairs = zip((found.out, *found.grads), (truth.out, *truth.grads), strict=True)
    return [error(a, b) for a, b in pairs]


def same_lse(found: Tensor, truth: Tensor, tolerance: float) -> None:
    """Rows that see no key have lse -inf, the others the truth."""
    assert torch.equal(found == -torch.inf, truth == -torch.inf)
    some = truth != -torch.inf
    assert error(found[some], truth[some]) <= tolerance


def solve(attend: Callable[..., Any], case: Case, *arguments: Any, return_lse: bool = True, **options: Any) -> Result:
    """The results and gradients of a function such as `ringattn.attention`; the gradient of `sinks=` comes last."""
    inputs = case.leaves()
    result = attend(*inputs, *arguments, return_lse=return_lse, scale=case.scale, **options)
    out, lse = result if return_lse else (result, torch.empty(0))
    leaves = inputs if options.get("sinks") is None else (*inputs, options["sinks"])
    if case.grad_lse is None:
        grads = torch.autograd.grad(out, leaves, case.grad)
    else:
        grads = torch.autograd.grad((out, lse), leaves, (case.grad, case.grad_lse.to(lse.dtype)))
    return Result(out.detach(), lse.detach(), grads)


def truth_of(case: Case, pattern: Pattern, oracle: Callable[..., Result] = dense) -> Result:
    """The oracle under the dense mask of a pattern."""
    heads, tokens = case.q.shape[1:3]
    return oracle(case, torch.from_numpy(pattern.mask(tokens, heads)), pattern.bind(heads, tokens).output_scale)


def trimmed(rows: int, keys: int, lo: int | None, hi: int | None) -> Work | None:
    """A work whose every row sees a key, as the planner makes them."""
    first = max(0, lo) if lo is not None else 0
    last = min(rows, keys + hi) if hi is not None else rows
    left = max(0, first - hi) if hi is not None else 0
    right = min(keys, last - lo) if lo is not None else keys
    if first >= last or left >= right:
        return None
    whole = Work(range(4), range(2), range(rows), (range(keys),), lo, hi)
    return whole.narrow((first, last), (left, right))


def visible(work: Work) -> Tensor:
    """Bool [rows, keys]: which keys the rows of a work see."""
    return band(len(work.q), work.keys, work.lo, work.hi, torch.device("cpu"))


def solve_calls(kernel: Kernel, case: Case, work: Work) -> Result:
    """The results and gradients of a work by the calls of a kernel, merged and added as the executor does."""
    q, k, v = case.inputs
    kind = wide(q.dtype)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=kind, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=kind, device=q.device)
    local = Work(work.heads, work.kv, range(len(work.q)), (range(work.keys),), work.lo, work.hi)
    for call, rows, keys in _calls(kernel, local):
        part, part_lse = kernel.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], call, case.factor)
        assert part_lse.dtype == kind and part_lse.shape == part.shape[:3]
        assert (part_lse != -torch.inf).all(), "every row of a call sees a key"
        merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)
    grads = tuple(torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in case.inputs)
    for call, rows, keys in _calls(kernel.for_backward(), local):
        parts = kernel.backward(
            *(case.grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys]),
            *(out[:, :, rows].to(q.dtype), lse[:, :, rows], call, case.factor),
        )
        for total, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
            total[:, :, where] += part
    return Result(out, lse, grads)


def _calls(kernel: Kernel, work: Work) -> Iterator[tuple[Work, slice, slice]]:
    """The calls of a kernel, with their rows and their keys."""
    for call in (single for batch in kernel.split(work) for single in batch.repetitions()):
        yield call, slice(call.q.start, call.q.stop), slice(call.k[0].start, call.k[-1].stop)


def note_passes(patch: pytest.MonkeyPatch, runner: type, *kinds: str) -> list[tuple[str, Any]]:
    """Where runners of a class note the passes of these kinds that they run from now on: (kind, runner)."""
    passes: list[tuple[str, Any]] = []

    def note(kind: str) -> Callable[..., Any]:
        honest = getattr(runner, kind)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            passes.append((kind, self))
            return honest(self, *arguments, **options)

        return noted

    for kind in kinds:
        patch.setattr(runner, kind, note(kind))
    return passes


def mark_pairs(found: np.ndarray, whole: Work, kv_heads: int | None) -> None:
    """Add the pairs of a work to `found` [H, queries, keys]; `kv_heads` None: those of its heads are not checked."""
    for turn in range(whole.repeat):
        rows = [i + turn * whole.q_shift for i in whole.q]
        keys = [j + turn * whole.k_shift for run in whole.k for j in run]
        i, j = np.arange(len(rows))[:, None], np.arange(len(keys))[None, :]
        seen = np.ones((len(rows), len(keys)), dtype=bool)
        seen &= whole.lo is None or i - j >= whole.lo
        seen &= whole.hi is None or i - j <= whole.hi
        assert seen.any(1).all(), "every row of a work sees a key"
        assert whole.dense == seen.all() or not whole.dense
        for head in whole.heads:
            assert kv_heads is None or head * kv_heads // len(found) in whole.kv
            np.add.at(found[head], np.ix_(rows, keys), seen.astype(int))
        assert set(rows) <= set(whole.rows)
