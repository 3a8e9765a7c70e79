"""Virtual rings on emulated CUDA ops: random configurations, covering designs of them, and one run against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate
from oracle import Case, Result, dense, errors, make_case, stored

import ringattn as ra
from ringattn.kernels.cuda_device import WHOLE_TILES_CUDNN, CudaDevice

#: Where a pattern depends on the number of tokens, it is made for that number.
DOCUMENTS = ("documents", "causal-documents", "hidden-rows", "empty-rows")
PATTERNS = {
    "full": "Full()",
    "causal": "Causal()",
    "window": "Causal() & Window(7)",
    "narrow": "Causal() & Window(1)",
    "two-sided": "Window(7, 4)",
    "sinks": "Causal() & (Sinks(3) | Window(6))",
    "strided": "Causal() & (Strided(3) | Window(2))",
    "mix": "mix(Causal(), Window(5, 5), Strided(4))",
    "longnet": "Dilated((8, 24, 64), (1, 2, 5))",
    "longnet-causal": "Dilated((7, 30), (2, 3), causal=True)",
    "dilated-groups": "Dilated((16, 32), (1, 3), causal=True, mix='group')",
    "dilated-union": "Dilated((16, 32), (1, 2), causal=True, mix='union') | Sinks(2)",
    "local-blocks": "Causal() & local_window(4, 2)",
    "global-blocks": "global_local(5, globals=1, blocks=1)",
    "dilated-blocks": "dilated_blocks(4, (1, 2, 4))",
    "block-union": "Causal() & (strided_blocks(3, stride=3) | Window(4))",
}


@dataclass(frozen=True)
class RingCase:
    """One configuration of a virtual ring; the names say what varies."""

    pattern: str
    kernel: str
    dtype: torch.dtype
    dims: tuple[int, int]
    heads: tuple[int, int]
    batch: int
    tokens: int
    ranks: int
    layout: str
    schedule: str
    rotate: str
    return_lse: bool
    cotangent: str
    inputs: str
    capability: tuple[int, int]

    @property
    def allowed(self) -> bool:
        """Whether the call is one that a CUDA machine computes."""
        flash = self.kernel.endswith(("flash", "cudnn"))
        old = self.capability < (8, 0) and (flash or self.dtype == torch.bfloat16)
        no_room = self.return_lse and max(self.dims) > 248
        teams = "(2)" in self.schedule and (self.ranks % 2 or (self.schedule == "ulysses(2)" and self.heads[1] % 2))
        return not old and not no_room and not teams


VALUES: dict[str, tuple[Any, ...]] = {
    "pattern": (*PATTERNS, *DOCUMENTS),
    "kernel": ("aten_cuda", "aten_cuda:flash", "aten_cuda:cudnn", "aten_cuda:efficient"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (40, 64), (64, 24), (20, 36), (128, 80), (200, 200)),
    "heads": ((2, 2), (4, 2), (3, 1), (4, 4)),
    "batch": (1, 1, 2),
    "tokens": (15, 22, 29),
    "ranks": (2, 2, 3, 4),
    "layout": ("contiguous", "zigzag", "striped", "striped(4)", "balanced(5)"),
    "schedule": ("ring", "direct", "allgather", "ulysses(2)", "double_ring(2)"),
    "rotate": ("keys", "queries"),
    "return_lse": (True, False),
    "cotangent": ("contiguous", "transposed", "expanded"),
    "inputs": ("contiguous", "heads last", "odd offset"),
    "capability": ((9, 0), (8, 0), (8, 6), (7, 5), (10, 0), (12, 0)),
}


def random_case(source: Random) -> RingCase:
    """A random configuration that a CUDA machine computes."""
    while True:
        case = RingCase(**{name: source.choice(values) for name, values in VALUES.items()})
        if case.allowed:
            return case


def covering_cases(seed: int, most: int) -> Iterator[RingCase]:
    """`most` configurations in which nearly all pairs of values of two fields occur, as `uncovered` tells."""
    source, seen = Random(seed), set[object]()
    for _ in range(most):
        best = max((random_case(source) for _ in range(60)), key=lambda case: len(pairs(case) - seen))
        seen |= pairs(best)
        yield best


def pairs(case: RingCase) -> set[object]:
    """The pairs of values that a configuration holds, with their fields."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return set(combinations(values, 2))


def make_pattern(name: str, tokens: int) -> ra.Pattern:
    half, third = tokens // 2, tokens // 3
    texts = {
        "documents": f"Documents([{half}, 1, {tokens - half - 1}])",
        "causal-documents": f"Causal() & Documents([{third}, {third}, {tokens - 2 * third}])",
        "hidden-rows": f"Strided(2) & Window(9, 0) & Documents([{third}, {tokens - third}]) & (Sinks({half}) | Full())",
        "empty-rows": f"Sinks(4) & Documents([{half}, {tokens - half}])",
    }
    return ra.parse_pattern(PATTERNS[name] if name in PATTERNS else texts[name])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The numbers of x [B, H, N, D] in another layout; "expanded" repeats the first column of x."""
    if layout in ("transposed", "heads last"):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[..., :1].expand(x.shape)
    if layout == "odd offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


def ratio_of(case: RingCase, seed: int = 0) -> float:
    """The largest error of out, dq, dk, dv and lse, as a multiple of what one call on one device may err.

    Raises what the ops or the ring refuse.
    """
    with pytest.MonkeyPatch.context() as patch:
        return _ratio(case, emulate(patch, CudaDevice(case.capability, WHOLE_TILES_CUDNN), any_dtype=True), seed)


def _ratio(case: RingCase, ops: EmulatedOps, seed: int) -> float:
    made = make_case(
        *(case.tokens, *case.heads, case.dtype),
        batch=case.batch,
        dim=case.dims[0],
        value_dim=case.dims[1],
        lse=case.return_lse,
        seed=seed,
    )
    grad = laid_out(made.grad, case.cotangent)
    made = Case(*made.inputs, grad, made.grad_lse)
    pattern = make_pattern(case.pattern, case.tokens)
    mask = torch.from_numpy(pattern.mask(case.tokens, case.heads[0]))
    oracle = dense(made, mask, pattern.output_scale)
    # What any single call must err that stores its results in this dtype; lucky calls err less than a rounding.
    rounding = torch.finfo(case.dtype).eps / 4
    allowed = [max(x, rounding) + 1e-6 for x in errors(stored(made, mask, pattern.output_scale), oracle)]
    q, k, v = (laid_out(x, case.inputs).detach().requires_grad_() for x in made.inputs)
    result = ra.virtual_attention(
        *(q, k, v, pattern),
        ranks=case.ranks,
        layout=case.layout,
        schedule=case.schedule,
        kernel=case.kernel,
        rotate=case.rotate,
        return_lse=case.return_lse,
    )
    if case.return_lse:
        out, lse = result
        seen = oracle.lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen), "rows that see no key have lse -inf"
        cotangent = (made.grad_lse * seen).to(lse.dtype)
        grads = torch.autograd.grad((out, lse), (q, k, v), (grad, cotangent))
        lse_error = float((lse.detach()[seen].double() - oracle.lse[seen]).abs().max())
    else:
        out, lse_error = result, 0.0
        grads = torch.autograd.grad(out, (q, k, v), grad)
    assert ops.calls, "the ring ran on emulated ops"
    found = errors(Result(out, oracle.lse, grads), oracle)
    return max(lse_error / 2e-5, *(e / a for e, a in zip(found, allowed, strict=True)))
