"""Suite "ring": what the ring costs over one process that does the same work with the same cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ...errors import Unsupported
from ...functional import ring_attention, virtual_attention
from ...layout.regular import Layout, make_layout
from ...pattern import Causal, Full
from ...planner import make_plan
from ...timing.costs import memory
from .case import BenchCase, BenchColumn, Context, Ratio, Run, relative_error

CORES = 2
HEADS, DIM = 8, 64
#: A result that differs from the single call by more than this is wrong, and is not timed.
WRONG = 1e-5
#: Columns of torch's own ring, by how its K/V travel: its default, and the one that hops as a ring does.
TEMPLATES = {"template": "allgather", "template_a2a": "alltoall"}
NOTE = (
    "template and template_a2a: torch's private context-parallel ring, on the same CPU flash op, with its rotate "
    "methods allgather (its default) and alltoall"
)
MEMORY_NOTE = (
    "memory: rise of VmHWM, reset by clear_refs, over VmRSS before the inputs exist, the worst of all rounds and ranks; "
    "glibc is told (mallopt) to give freed blocks back at once, as it would otherwise keep some from an earlier round; "
    "formula: the model of memory of ra.simulate"
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cases() -> list[BenchCase]:
    """Targets are the project's promises; the template is torch's own context-parallel ring on the same kernel."""
    table = (
        ("dense_16384", 16384, False, False, 0.98),
        ("dense_8192", 8192, False, False, 0.97),
        ("causal_16384", 16384, True, False, 0.95),
        ("causal_8192", 8192, True, False, None),
        ("dense_8192_backward", 8192, False, True, 0.96),
        ("causal_8192_backward", 8192, True, True, 0.96),
    )
    found = [_against_single(*row) for row in table]
    found.append(_virtual("virtual_dense_8192", False, 0.93))
    found.append(_virtual("virtual_causal_8192", True, 0.85))
    found += [_memory(ranks, rotate) for rotate in (None, "keys", "queries") for ranks in (2, 4)]
    return found


def _settings(tokens: int, causal: bool, backward: bool, **more: Any) -> dict[str, Any]:
    layout = "zigzag" if causal else "contiguous"
    return {
        "batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "tokens": tokens,
        "causal": causal, "layout": layout, "backward": backward, **more,
    }  # fmt: skip


def _whole(settings: dict[str, Any]) -> list[torch.Tensor]:
    """q, k, v and a cotangent, the same on every rank."""
    source = torch.Generator().manual_seed(1)
    shape = (settings["batch"], HEADS, settings["tokens"], DIM)
    return [torch.randn(shape, generator=source, device="cpu") for _ in range(4)]


def _layout(context: Context) -> Layout:
    return make_layout(context.settings["layout"], tokens=context.settings["tokens"], ranks=context.ranks)


def _local(context: Context) -> list[torch.Tensor]:
    return [_layout(context).shard_tensor(x, context.rank).clone() for x in _whole(context.settings)]


def _differentiated(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> Run:
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run() -> tuple[torch.Tensor, ...]:
        out = attend(*inputs)
        return (out.detach(), *torch.autograd.grad(out, inputs, grad))

    return run


def _single(context: Context) -> Run | None:
    if context.rank:
        return None
    q, k, v, grad = _whole(context.settings)
    causal = context.settings["causal"]
    if context.settings["backward"]:
        return _differentiated(partial(scaled_dot_product_attention, is_causal=causal), q, k, v, grad)
    return lambda: (scaled_dot_product_attention(q, k, v, is_causal=causal),)


def _ring(context: Context) -> Run:
    q, k, v, grad = _local(context)
    pattern = Causal() if context.settings["causal"] else Full()
    layout = context.settings["layout"]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(q, k, v, pattern, layout=layout, schedule="ring")

    if context.settings["backward"]:
        return _differentiated(attend, q, k, v, grad)
    return lambda: (attend(q, k, v),)


def _template(context: Context, rotate: str) -> Run:
    """torch's `_templated_ring_attention` with the CPU flash op; its head-tail balance is our zigzag.

    `rotate` is how its K/V travel in the forward and the backward, as in torch's `set_rotate_method`.
    """
    try:  # private: only the cases that compare with it need it
        import torch.distributed.tensor.experimental._context_parallel._attention as cp
    except ImportError as error:
        raise Unsupported(
            f"torch {torch.__version__} has no context-parallel template where torch 2.13 has it ({error}); "
            "leave its cases out with cases=[...]"
        ) from error
    q, k, v, grad = _local(context)
    causal, scale = context.settings["causal"], DIM**-0.5
    group: Any = dist.group.WORLD

    def run() -> tuple[torch.Tensor, ...]:
        cp.set_rotate_method(rotate)
        cp._cp_options.enable_load_balance = causal
        out, lse, *_ = cp._templated_ring_attention(group, 2, _flash, q, k, v, is_causal=causal, scale=scale)
        if not context.settings["backward"]:
            return (out,)
        grads = cp._templated_ring_attention_backward(
            group, 2, _flash_backward, grad, "grad_out", q, k, v, out, lse, is_causal=causal, dropout_p=0.0, scale=scale
        )
        return (out, *grads[:3])

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest error of every column against the single call, over out and gradients."""
    layout, errors = _layout(context), {}
    for name in ("ring", *TEMPLATES):
        wholes = []
        for x in results[name]:
            shards = [x.new_empty((*x.shape[:2], layout.rows(r), DIM)) for r in range(context.ranks)]
            dist.all_gather(shards, x.contiguous())
            wholes.append(layout.unshard_tensor(shards))
        if context.rank == 0:
            errors[name] = max(relative_error(a, b) for a, b in zip(wholes, results["single"], strict=True))
            assert errors[name] < WRONG, f"{name} is wrong by {errors[name]:.1e}"
    return errors


def _against_single(name: str, tokens: int, causal: bool, backward: bool, target: float | None) -> BenchCase:
    return BenchCase(
        name,
        CORES,
        _settings(tokens, causal, backward),
        (
            BenchColumn("single", CORES, _single),
            BenchColumn("ring", 1, _ring),
            *(BenchColumn(name, 1, partial(_template, rotate=rotate)) for name, rotate in TEMPLATES.items()),
        ),
        (Ratio("single", "ring", target), *(Ratio(name, "ring", 1.0) for name in TEMPLATES)),
        _check,
        notes=(NOTE,),
    )


def _virtual_ring(context: Context) -> Run:
    q, k, v, _ = _whole(context.settings)
    pattern = Causal() if context.settings["causal"] else Full()
    return lambda: (virtual_attention(q, k, v, pattern, ranks=context.settings["virtual_ranks"], schedule="ring"),)


def _check_virtual(context: Context, results: dict[str, Any]) -> dict[str, float]:
    error = relative_error(results["virtual"][0], results["single"][0])
    assert error < WRONG, f"the virtual ring is wrong by {error:.1e}"
    return {"virtual": error}


def _virtual(name: str, causal: bool, target: float) -> BenchCase:
    settings = {**_settings(8192, causal, False, virtual_ranks=8), "layout": "contiguous"}
    columns = (BenchColumn("single", CORES, _single), BenchColumn("virtual", CORES, _virtual_ring))
    return BenchCase(name, 1, settings, columns, (Ratio("single", "virtual", target),), _check_virtual)


def _memory(ranks: int, rotate: str | None = None, *, rows: int = 4096) -> BenchCase:
    """Contiguous dense attention with `rows` tokens per rank: the peak must not grow with the ranks, and is what the model of
    memory says. With `rotate`, forward and backward, which need most in the backward."""

    def formula(context: Context) -> int:
        plan = make_plan(
            Full(), tokens=context.settings["tokens"], ranks=context.ranks, schedule="ring", heads=HEADS, head_dim=DIM,
            dtype=context.settings["dtype"], rotate=rotate or "auto",
        )  # fmt: skip
        return sum(memory(plan, backward=rotate is not None).values())

    def make(context: Context) -> Run:
        local = context.settings["tokens"] // context.ranks  # fewer than `rows` in the warm-up
        q, k, v, *grad = (torch.randn(1, HEADS, local, DIM, device="cpu") for _ in range(4 if rotate else 3))
        attend = partial(ring_attention, pattern=Full(), layout="contiguous", schedule="ring", rotate=rotate or "auto")
        return _differentiated(attend, q, k, v, *grad) if rotate else lambda: attend(q, k, v)

    more = {"rotate": rotate} if rotate else {}
    return BenchCase(
        f"memory_{rotate}_{ranks}_ranks" if rotate else f"memory_{ranks}_ranks",
        ranks,
        _settings(rows * ranks, False, rotate is not None, **more),
        (BenchColumn("ring", 1, make),),
        memory=formula,
        limit=1.1,
        notes=(MEMORY_NOTE,),
    )
