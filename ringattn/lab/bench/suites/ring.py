"""Suite "ring": the ring against one process that does the same work with the same cores."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ....call.functional import ring_attention, virtual_attention
from ....call.planner import make_plan
from ....errors import Unsupported
from ....kernels.aten_cpu import bf16_is_fast
from ....pattern import Full
from ....simulator.timing.costs import memory
from .. import calls
from ..case import HEAD_DIM, HEADS, BenchCase, BenchColumn, BenchSuite, Context, Ratio, Run, make_settings
from .schedules import InstantTransport

CORES = 2
#: Columns of torch's own ring, with its method to rotate K and V: torch's default, and messages between neighbours.
TEMPLATES = {"template": "allgather", "template_a2a": "alltoall"}
NOTE = (
    "template and template_a2a: torch's private context-parallel ring, on the same CPU flash op, with its rotate "
    "methods allgather (its default) and alltoall. compute: the ring over a transport whose messages take no time: "
    "single / compute is what a ring can reach with the shapes of its kernel calls, and the targets of single / ring "
    "and of the templates are 0.1 below 1, as the rounds of one run differ by that much"
)
MEMORY_NOTE = (
    "memory: rise of VmHWM, reset by clear_refs, over VmRSS before the inputs exist, the worst of all rounds and "
    "ranks; mallopt makes glibc return freed blocks at once, as glibc would otherwise keep blocks of an earlier round; "
    "formula: the model of memory of ra.simulate"
)

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def list_cases() -> list[BenchCase]:
    """The cases: rings against one call and torch's template, virtual rings, and peak memory.

    Targets are the project's promises.
    """
    return [
        *(_ring_case(causal, backward) for backward in (False, True) for causal in (False, True)),
        *(_half_case(*each) for each in product(("bfloat16", "float16"), (False, True), (False, True))),
        _virtual_case("virtual_dense_8192", False, 0.93),
        _virtual_case("virtual_causal_8192", True, 0.85),
        *(_memory_case(ranks, rotate) for rotate in (None, "kv", "q") for ranks in (2, 4)),
    ]


def _settings(tokens: int, causal: bool, backward: bool, **more: Any) -> dict[str, Any]:
    pattern, layout = ("Causal()", "zigzag") if causal else ("Full()", "contiguous")
    return make_settings(tokens, pattern=pattern, causal=causal, layout=layout, backward=backward, **more)


def make_template(context: Context, rotate: str) -> Run:
    """A function that runs torch's `_templated_ring_attention` with the CPU flash op.

    For causal attention, torch's load balancing gives each rank the rows of ringattn's zigzag layout. `rotate` is
    passed to torch's `set_rotate_method`.
    """
    try:  # a private module, needed only in cases that compare with it
        import torch.distributed.tensor.experimental._context_parallel._attention as template
    except ImportError as error:
        raise Unsupported(
            f"torch {torch.__version__} lacks the context-parallel template of torch 2.13 ({error}); "
            "leave its cases out with cases=[...]"
        ) from error
    q, k, v, grad = calls.make_shards(context, calls.make_inputs(context.settings, 4))
    group: Any = dist.group.WORLD
    causal = context.settings["causal"]
    options: Any = {"is_causal": causal, "scale": HEAD_DIM**-0.5}

    def run() -> tuple[torch.Tensor, ...]:
        template.set_rotate_method(rotate)
        template._cp_options.enable_load_balance = causal
        out, lse, *_ = template._templated_ring_attention(group, 2, CPU_FLASH, q, k, v, **options)
        if not context.settings["backward"]:
            return (out,)
        grads = template._templated_ring_attention_backward(
            group, 2, CPU_FLASH_BACKWARD, grad, "grad_out", q, k, v, out, lse, dropout_p=0.0, **options
        )
        return (out, *grads[:3])

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """For each column, the largest relative error of output and gradients against the single call; on rank 0."""
    errors = {}
    for name, tensors in results.items():
        on_ranks = name in ("ring", *TEMPLATES)
        whole = [calls.gather(x, calls.get_layout(context)) for x in tensors] if on_ranks else tensors
        if context.rank == 0 and name not in ("single", "compute"):  # the messages of compute bring zeros
            errors[name] = calls.check_error(name, whole, results["single"])
    return errors


def _ring_case(causal: bool, backward: bool, tokens: int = 4096) -> BenchCase:
    columns = (
        BenchColumn("single", CORES, calls.make_single),
        BenchColumn("compute", 1, lambda context: calls.make_ring(context, transport=InstantTransport())),
        BenchColumn("ring", 1, calls.make_ring),
        *(BenchColumn(column, 1, partial(make_template, rotate=rotate)) for column, rotate in TEMPLATES.items()),
    )
    alike = (Ratio(column, "ring", 0.9) for column in ("compute", "single", *TEMPLATES))
    ratios = (Ratio("single", "compute"), *alike)
    name = f"{'causal' if causal else 'dense'}_{tokens}" + "_backward" * backward
    return BenchCase(name, CORES, _settings(tokens, causal, backward), columns, ratios, _check, notes=(NOTE,))


def _half_case(dtype: str, causal: bool, backward: bool, tokens: int = 4096) -> BenchCase:
    """A case in a 16-bit dtype: torch's own call, one rank with as many threads, and two ranks."""
    name = f"{'causal' if causal else 'dense'}_{tokens}_{dtype}" + "_backward" * backward
    columns = (
        BenchColumn("single", CORES, calls.make_single),
        BenchColumn("one rank", CORES, calls.make_ours),
        BenchColumn("ring", 1, calls.make_ring),
    )
    ratios = (Ratio("single", "one rank", 0.95), Ratio("single", "ring", 0.95))
    settings = _settings(tokens, causal, backward, dtype=dtype)
    unit = "a" if bf16_is_fast(backward=False) else "no"
    note = f"This CPU has {unit} matrix unit for bf16 (AMX)."
    return BenchCase(name, CORES, settings, columns, ratios, _check, notes=(note,))


def _make_virtual_ring(context: Context) -> Run:
    settings = context.settings
    options: Any = {"pattern": settings["pattern"], "ranks": settings["virtual_ranks"], "schedule": "ring"}
    return calls.make_call(context, partial(virtual_attention, **options), whole=True)


def _virtual_case(name: str, causal: bool, target: float) -> BenchCase:
    settings = {**_settings(8192, causal, False, virtual_ranks=8), "layout": "contiguous"}
    columns = (BenchColumn("single", CORES, calls.make_single), BenchColumn("virtual", CORES, _make_virtual_ring))
    return BenchCase(name, 1, settings, columns, (Ratio("single", "virtual", target),), _check)


def _memory_case(ranks: int, rotate: str | None = None, *, rows: int = 4096) -> BenchCase:
    """A case of peak memory: contiguous dense attention, `rows` tokens per rank, forward; with `rotate`, also backward.

    The peak must match the memory model, and must not grow with the ranks.
    """
    backward = rotate is not None
    options: Any = {"schedule": "ring", "rotate": rotate or "auto"}

    def formula(context: Context) -> int:
        sizes = {name: context.settings[name] for name in ("tokens", "heads", "head_dim", "dtype")}
        return sum(memory(make_plan(Full(), ranks=context.ranks, **sizes, **options), backward=backward).values())

    def make(context: Context) -> Run:
        shard = context.settings["tokens"] // context.ranks  # fewer tokens than `rows` in the warm-up
        tensors = [torch.randn(1, HEADS, shard, HEAD_DIM, device="cpu") for _ in range(4 if backward else 3)]
        attend = partial(ring_attention, pattern=Full(), layout="contiguous", **options)
        return calls.make_pass(attend, tensors[:3], tensors[3] if backward else None)

    return BenchCase(
        f"memory_{rotate}_{ranks}_ranks" if rotate else f"memory_{ranks}_ranks",
        ranks,
        _settings(rows * ranks, False, backward, **({"rotate": rotate} if rotate else {})),
        (BenchColumn("ring", 1, make),),
        formula_bytes=formula,
        limit=1.1,
        rounds=2,
        notes=(MEMORY_NOTE,),
    )


SUITE = BenchSuite(
    list_cases,
    title="The ring against one process with as many threads",
    about=("Above 1 the ring is faster: X / ring is the time of X over the ring's, in turns on the same cores.",),
)
