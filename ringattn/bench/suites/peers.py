"""Suite "peers": other libraries on the same machine, tensors and threads, in turns with ours. Right results first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ...errors import Unsupported
from ...functional import ring_attention
from ...layout.regular import make_layout
from ...pattern import Causal, Dilated, Full
from ...text import shorten
from ..case import (
    BenchCase,
    BenchColumn,
    BenchSuite,
    CaseRecord,
    Context,
    Ratio,
    Run,
    make_inputs,
    make_pass,
    make_settings,
    make_shards,
    relative_error,
)
from ..libraries import CANNOT_RUN, Mask, list_masks, make_call
from ..runner import time_rounds, weigh
from .ring import CPU_FLASH, CPU_FLASH_BACKWARD, TEMPLATES, gather, make_template

RANKS, HEADS, HEAD_DIM, TOKENS = 2, 8, 64, 4096
#: Most relative error of a result against dense attention in fp64; a result with a larger error is not timed.
TOLERANCE = 1e-5
#: The promised ratio of the time of the fastest peer with right results to ours, by mask.
TARGETS = {"dense": 1.0, "causal": 1.0, "window": 2.0, "documents": 2.0, "dilated": 2.0}
#: Where ranks of contiguous shards would not have equal work.
LAYOUTS = {"causal": "zigzag", "documents": "zigzag"}
NOTE = (
    "peers: 2 Gloo ranks of one thread each; sdpa and FlexAttention are one process with two threads and the whole "
    "sequence. error: the largest of output and gradients against dense attention in fp64, relative to the largest "
    "entry; what is wrong is not timed. template: PyTorch's private context-parallel ring on its CPU flash op, with "
    "either rotate method. ring-flash-attn runs over a stand-in for its CUDA kernel that calls the same CPU op. "
    "ring-attention-pytorch has its own CPU path. These two are installed by pip install 'ringattn[peers]'. torchscale "
    "is the fork torchscale-gml, which has dilated attention, without projections and over the same CPU op; its order "
    "of the heads costs it a copy of each tensor"
)


@dataclass(frozen=True)
class Peer:
    """A library: `make` gives the run of a rank, None where the rank only waits, or raises one of `CANNOT_RUN`.

    `layout` is that of its shards, None for that of the case; `whole`: rank 0 computes the whole sequence.
    """

    make: Callable[[Context, Mask], Run | None]
    layout: str | None = None
    whole: bool = False


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unsupported(reason)


def _pass(context: Context, attend: Callable[..., torch.Tensor], layout: str | None = None) -> Run:
    """A run of attend(q, k, v) on the shards of this rank, or on the whole sequence for layout "whole"."""
    tensors = make_inputs(context.settings, 4)
    if layout != "whole":
        chosen = {**context.settings, "layout": layout or context.settings["layout"]}
        tensors = make_shards(Context(context.rank, context.ranks, chosen), tensors)
    *inputs, grad = tensors
    return make_pass(attend, inputs, grad if context.settings["backward"] else None)


def _make_ours(context: Context, mask: Mask) -> Run:
    return _pass(context, partial(ring_attention, pattern=mask.pattern, layout=context.settings["layout"]))


def _make_sdpa(context: Context, mask: Mask) -> Run | None:
    if context.rank:
        return None
    options: dict[str, Any] = {"is_causal": isinstance(mask.pattern, Causal)}
    if not isinstance(mask.pattern, Full | Causal):
        options = {"attn_mask": torch.from_numpy(mask.pattern.mask(context.settings["tokens"], HEADS)) > 0}
    return _pass(context, partial(scaled_dot_product_attention, **options), "whole")


def _make_flex(context: Context, mask: Mask) -> Run | None:
    if context.rank:
        return None
    return _pass(context, make_call("FlexAttention", mask, context.settings["tokens"], HEADS, "cpu"), "whole")


def _make_template(context: Context, mask: Mask, rotate: str) -> Run:
    _require(isinstance(mask.pattern, Full | Causal), "PyTorch's ring has no such mask")
    return make_template(context, rotate)


def _make_ring_attention_pytorch(context: Context, mask: Mask) -> Run:
    _require(
        isinstance(mask.pattern, Full | Causal), "ring-attention-pytorch has no such mask (windows: whole buckets)"
    )
    library: Any = import_module("ring_attention_pytorch.ring_flash_attention")
    options = {"causal": isinstance(mask.pattern, Causal), "ring_reduce_col": True, "ring_size": context.ranks}
    attend = partial(
        library.ring_flash_attn, bucket_size=min(512, context.settings["tokens"] // context.ranks), **options
    )
    return _pass(context, lambda *qkv: attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2), "contiguous")


def _make_ring_flash_attn(context: Context, mask: Mask) -> Run:
    _require(isinstance(mask.pattern, Full | Causal), "ring-flash-attn: its kernel for such masks has no stand-in here")
    sys.modules.setdefault("flash_attn", ModuleType("flash_attn"))
    sys.modules.setdefault("flash_attn.flash_attn_interface", make_flash_attn())
    hugging_face = ModuleType("ring_flash_attn.adapters")  # does not import with transformers 5, and is not measured
    vars(hugging_face).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(hugging_face.__name__, hugging_face)
    library: Any = import_module("ring_flash_attn")
    causal = isinstance(mask.pattern, Causal)
    attend = partial(library.zigzag_ring_flash_attn_func if causal else library.ring_flash_attn_func, causal=causal)
    return _pass(context, lambda *qkv: attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2))


def _make_torchscale(context: Context, mask: Mask) -> Run:
    _require(isinstance(mask.pattern, Dilated), "torchscale has this for dilated attention only")
    assert isinstance(mask.pattern, Dilated)
    try:
        library: Any = import_module("torchscale.component.dilated_attention")
    except ModuleNotFoundError as error:
        raise Unsupported(
            "torchscale 0.3.0 has no dilated attention: pip install --no-deps torchscale-gml einops"
        ) from error
    segments, rates = mask.pattern.segments, mask.pattern.rates
    args = SimpleNamespace(
        multiway=False, xpos_rel_pos=False, flash_attention=True, seq_parallel=True, layernorm_eps=1e-5,
        segment_length=list(segments), dilated_ratio=list(rates),
    )  # fmt: skip
    # The function that calls CUDA kernels; the library itself says None where there is no GPU.
    vars(import_module("torchscale.component.multihead_attention"))["flash_attn_func"] = _flash_for_torchscale
    module = library.DilatedAttention(args, HEADS * HEAD_DIM, HEADS, self_attention=True)
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()
    # Its head t has the dilation offset t // (H / rate), ours the offset t % rate.
    order = sorted(range(HEADS), key=lambda head: head % rates[0])
    back = sorted(range(HEADS), key=lambda t: order[t])

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out = module(*(x.transpose(1, 2)[:, :, order].flatten(2) for x in qkv))[0]
        return out.unflatten(2, (HEADS, HEAD_DIM))[:, :, back].transpose(1, 2)

    return _pass(context, attend, "contiguous")


def _flash_for_torchscale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, bias: None, scale: None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention of [B, N, H, D] with its log-sum-exp [B, H, N], by the CPU op that our kernel calls, too."""
    out, lse = CPU_FLASH(*(x.transpose(1, 2) for x in (q, k, v)), dropout, causal)
    return out.transpose(1, 2), lse


def make_flash_attn() -> ModuleType:
    """A stand-in for flash_attn.flash_attn_interface: tensors [B, N, H, D], the CPU op that our kernel calls, too."""

    def forward(
        q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None,
        return_softmax: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        _require(window_size_left < 0 and not dropout_p, "the stand-in has no window and no dropout")
        out, lse = CPU_FLASH(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, rng_state: Any = None,
    ) -> None:  # fmt: skip
        heads_first = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        grads = CPU_FLASH_BACKWARD(*heads_first, softmax_lse.contiguous(), 0.0, causal, scale=softmax_scale)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad.transpose(1, 2))

    module = ModuleType("flash_attn.flash_attn_interface")
    vars(module).update(
        _flash_attn_forward=forward,
        _flash_attn_backward=backward,
        _flash_attn_varlen_forward=None,
        _flash_attn_varlen_backward=None,
    )
    return module


#: Ours first; the columns of every case.
PEERS: dict[str, Peer] = {
    "ringattn": Peer(_make_ours),
    "sdpa": Peer(_make_sdpa, whole=True),
    "FlexAttention": Peer(_make_flex, whole=True),
    **{name: Peer(partial(_make_template, rotate=rotate)) for name, rotate in TEMPLATES.items()},
    "ring-flash-attn": Peer(_make_ring_flash_attn),
    "ring-attention-pytorch": Peer(_make_ring_attention_pytorch, layout="contiguous"),
    "torchscale": Peer(_make_torchscale),
}


def list_cases(tokens: int = TOKENS) -> list[BenchCase]:
    """Five masks, forward, and forward and backward."""
    cases = []
    for name, mask in list_masks(tokens, tokens // 16 - 1, 128, tokens // 4, 4).items():
        for backward in (False, True) if name in TARGETS else ():
            settings = make_settings(
                HEADS, HEAD_DIM, tokens, mask=name, pattern=repr(mask.pattern), backward=backward,
                causal=name == "causal", layout=LAYOUTS.get(name, "contiguous"), target=TARGETS[name],
            )  # fmt: skip
            columns = tuple(BenchColumn(x, RANKS if y.whole else 1, lambda context: None) for x, y in PEERS.items())
            ratios = tuple(Ratio(peer, "ringattn") for peer in PEERS if peer != "ringattn")
            options: Any = {"notes": (NOTE,), "summarise": judge, "measure": partial(measure_peers, mask)}
            cases.append(
                BenchCase(
                    f"{name}_{'backward' if backward else 'forward'}", RANKS, settings, columns, ratios, **options
                )
            )
    return cases


def measure_peers(mask: Mask, context: Context, repeat: int) -> dict[str, Any]:
    """Seconds and peaks of every library that runs here and is right, the errors, and why the others are missing."""
    exact = compute_dense(context, mask) if context.rank == 0 else []
    runs: dict[str, tuple[int, Run | None]] = {}
    errors, missing = {}, {}
    for name, peer in PEERS.items():
        threads, run, reason = RANKS if peer.whole else 1, None, ""
        tensors: Any = None
        try:
            run = peer.make(context, mask)
            torch.set_num_threads(threads)
            tensors = run() if run is not None else None
        except CANNOT_RUN as error:
            reason = f"cannot run: {type(error).__name__}: {shorten(str(error).strip().splitlines()[0], 120)}"
        reasons = [""] * context.ranks
        dist.all_gather_object(reasons, reason)
        reason = max(reasons, key=len)
        if not reason:
            if not peer.whole:
                layout = make_layout(
                    peer.layout or context.settings["layout"], tokens=context.settings["tokens"], ranks=context.ranks
                )
                tensors = [gather(x, layout) for x in tensors]
            found = [max(relative_error(x, y) for x, y in zip(tensors, exact, strict=True)) if exact else 0.0]
            dist.broadcast_object_list(found)
            errors[name] = found[0]
            if not errors[name] < TOLERANCE:
                reason = f"wrong: relative error {errors[name]:.1e}; not timed"
        if reason:
            missing[name] = reason
        else:
            runs[name] = (threads, run)
    times = time_rounds(runs, repeat)
    # Under a counter of tensors FlexAttention is not compiled, and holds what the compiled call never holds.
    columns = [
        BenchColumn(name, run[0], lambda context, peer=PEERS[name]: peer.make(context, mask))  # type: ignore[misc]
        for name, run in runs.items()
        if name != "FlexAttention"
    ]
    del runs, run, tensors
    peaks = {column.name: weigh(column, context) for column in columns}
    return {"times": times, "errors": errors, "peaks": peaks, "details": {"missing": missing}}


def compute_dense(context: Context, mask: Mask) -> list[torch.Tensor]:
    """The output, and with a backward the gradients of q, k and v, of dense attention in fp64, head by head."""
    settings = context.settings
    parts = []
    for h in range(HEADS):
        q, k, v, grad = (x[:, h : h + 1].double() for x in make_inputs(settings, 4))
        seen = torch.from_numpy(mask.pattern.mask(settings["tokens"], HEADS)[h] > 0)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor = seen) -> torch.Tensor:
            scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~seen, torch.finfo(torch.float64).min)
            return (scores.softmax(-1) * seen) @ v

        parts.append(make_pass(attend, [q, k, v], grad if settings["backward"] else None)())
    return [torch.cat(heads, 1) for heads in zip(*parts, strict=True)]


def judge(record: CaseRecord) -> dict[str, Any]:
    """The fastest peer with right results, and the ratio of its time to ours."""
    medians = {name: column["median"] for name, column in record["columns"].items()}
    ours, target = medians.pop("ringattn", None), record["settings"]["target"]
    if ours is None or not medians:
        return {"fastest right peer": "none", "peer / ringattn": 0.0, "target": target, "met": False}
    best = min(medians, key=lambda name: medians[name])
    ratio = medians[best] / ours
    return {"fastest right peer": best, "peer / ringattn": ratio, "target": target, "met": ratio >= target}


def conclude(records: list[CaseRecord]) -> dict[str, Any]:
    """In how many cases ours is as many times faster than the fastest right peer as was promised."""
    met = sum(record.get("summary", {}).get("met", False) for record in records)
    return {
        "summary": f"as fast as promised against the fastest right peer in {met} of {len(records)} cases",
        "value": met,
        "target": len(records),
        "met": met == len(records),
    }


SUITE = BenchSuite(
    list_cases,
    conclude,
    title="Other libraries beside ours",
    about=(
        "The same tensors, threads and machine, in turns: batch 1, 8 heads of 64, 4,096 tokens, fp32. A library that "
        "cannot run here, or whose result is wrong, is a row that says so. Targets: at least as fast as the fastest "
        "right peer on dense and causal masks, and twice as fast on windows, documents and dilated masks.",
    ),
)
