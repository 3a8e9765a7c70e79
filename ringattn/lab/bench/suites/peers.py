"""Suite "peers": other libraries in turns with ours, on the same tensors and threads. Wrong results are not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ....errors import Unsupported
from ....pattern import Dilated
from .. import calls
from ..case import HEAD_DIM, HEADS, BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, Run, make_settings
from ..libraries import CANNOT_RUN, Mask, list_masks, make_call
from .ring import CPU_FLASH, CPU_FLASH_BACKWARD, TEMPLATES, make_template

RANKS, TOKENS = 2, 4096
#: By mask, the promised ratio of the time of the fastest peer with correct results to our time. On dense and causal
#: masks, up to five peers call the same op, and the fastest of them took 0.84 to 1.0 of our time. On windows and
#: documents FlexAttention's compiled kernel is the fastest; PyTorch's flash op limits ours (docs/measured.md).
TARGETS = {"dense": 0.8, "causal": 0.8, "window": 1.0, "documents": 1.0, "dilated": 2.0}
#: Layouts for masks with which contiguous shards would not have equal work.
LAYOUTS = {"causal": "zigzag", "documents": "zigzag"}
NOTE = (
    "peers: 2 Gloo ranks of one thread each; sdpa and FlexAttention are one process with two threads and the whole "
    "sequence. error: the largest of output and gradients against dense attention in fp64, relative to the largest "
    "entry; wrong results are not timed. template: PyTorch's private context-parallel ring on its CPU flash op, with "
    "either rotate method. ring-flash-attn runs over a stand-in for its CUDA kernel that calls the same CPU op. "
    "ring-attention-pytorch has its own CPU path. These two are installed by pip install 'ringattn[peers]'. torchscale "
    "is the fork torchscale-gml, which has dilated attention, without projections and over the same CPU op; its order "
    "of the heads requires a copy of each tensor"
)


def _list_masks(tokens: int) -> dict[str, Mask]:
    masks = list_masks(tokens, tokens // 16 - 1, 128, tokens // 4, 4)
    return {name: mask for name, mask in masks.items() if name in TARGETS}


def _get_mask(context: Context) -> Mask:
    return _list_masks(context.settings["tokens"])[context.settings["mask"]]


def _require_plain(context: Context, reason: str) -> None:
    if context.settings["mask"] not in ("dense", "causal"):
        raise Unsupported(reason)


def _make_sdpa(context: Context) -> Run | None:
    if context.settings["mask"] in ("dense", "causal"):
        return calls.make_single(context)
    seen = torch.from_numpy(_get_mask(context).pattern.mask(context.settings["tokens"], HEADS)) > 0
    return calls.make_alone(context, partial(scaled_dot_product_attention, attn_mask=seen))


def _make_flex(context: Context) -> Run | None:
    mask, tokens = _get_mask(context), context.settings["tokens"]
    return None if context.rank else calls.make_alone(context, make_call("FlexAttention", mask, tokens, HEADS, "cpu"))


def _make_template(context: Context, rotate: str) -> Run:
    _require_plain(context, "PyTorch's ring has no such mask")
    return make_template(context, rotate)


def _make_ring_attention_pytorch(context: Context) -> Run:
    _require_plain(context, "ring-attention-pytorch has no such mask (windows: whole buckets)")
    library: Any = import_module("ring_attention_pytorch.ring_flash_attention")
    options = {"causal": context.settings["causal"], "ring_reduce_col": True, "ring_size": context.ranks}
    attend = partial(
        library.ring_flash_attn, bucket_size=min(512, context.settings["tokens"] // context.ranks), **options
    )
    return calls.make_call(context, _swap(attend), layout="contiguous")


def _swap(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a library call on [B, N, H, D] so that it takes and returns [B, H, N, D]."""
    return lambda *qkv: attend(*(x.transpose(1, 2) for x in qkv)).transpose(1, 2)


def import_ring_flash_attn() -> Any:
    """Import ring-flash-attn; without flash-attn, its CUDA kernel is replaced by a CPU op.

    Raises ImportError if ring-flash-attn is not installed.
    """
    sys.modules.setdefault("flash_attn", ModuleType("flash_attn"))
    sys.modules.setdefault("flash_attn.flash_attn_interface", make_flash_attn())
    hugging_face = ModuleType("ring_flash_attn.adapters")  # cannot be imported with transformers 5; not measured
    vars(hugging_face).update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(hugging_face.__name__, hugging_face)
    return import_module("ring_flash_attn")


def _make_ring_flash_attn(context: Context) -> Run:
    _require_plain(context, "ring-flash-attn: its kernel for such masks has no stand-in here")
    library = import_ring_flash_attn()
    causal = context.settings["causal"]
    attend = partial(library.zigzag_ring_flash_attn_func if causal else library.ring_flash_attn_func, causal=causal)
    return calls.make_call(context, _swap(attend))


def _make_torchscale(context: Context) -> Run:
    pattern = _get_mask(context).pattern
    if not isinstance(pattern, Dilated):
        raise Unsupported("torchscale computes dilated attention only")
    try:
        library: Any = import_module("torchscale.component.dilated_attention")
    except ModuleNotFoundError as error:
        raise Unsupported(
            "torchscale 0.3.0 has no dilated attention: pip install --no-deps torchscale-gml einops"
        ) from error
    segments, rates = pattern.segments, pattern.rates
    args = SimpleNamespace(
        multiway=False, xpos_rel_pos=False, flash_attention=True, seq_parallel=True, layernorm_eps=1e-5,
        segment_length=list(segments), dilated_ratio=list(rates),
    )  # fmt: skip
    # The function that calls CUDA kernels; the library sets it to None without a GPU.
    vars(import_module("torchscale.component.multihead_attention"))["flash_attn_func"] = _flash_for_torchscale
    module = library.DilatedAttention(args, HEADS * HEAD_DIM, HEADS, self_attention=True)
    module.q_proj = module.k_proj = module.v_proj = module.out_proj = torch.nn.Identity()
    # Head t has dilation offset t // (H / rate) in torchscale, and t % rate in ours.
    order = sorted(range(HEADS), key=lambda head: head % rates[0])
    back = sorted(range(HEADS), key=lambda t: order[t])

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out = module(*(x.transpose(1, 2)[:, :, order].flatten(2) for x in qkv))[0]
        return out.unflatten(2, (HEADS, HEAD_DIM))[:, :, back].transpose(1, 2)

    return calls.make_call(context, attend)


def _flash_for_torchscale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, bias: None, scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flash attention of [B, N, H, D], and its log-sum-exp [B, H, N], by the same CPU op as our kernel."""
    out, lse = CPU_FLASH(*(x.transpose(1, 2) for x in (q, k, v)), dropout, causal, scale=scale)
    return out.transpose(1, 2), lse


def _score(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, window: int) -> torch.Tensor:
    """Logits [B, H, N, N] of q and k [B, N, H, D] with at most `window` keys before each row's own."""
    distance = torch.arange(q.shape[1], device="cpu")[:, None] - torch.arange(k.shape[1], device="cpu")
    seen = (distance <= window) & (distance >= 0) if causal else distance <= window
    return (q.transpose(1, 2) @ k.transpose(1, 2).mT * scale).masked_fill(~seen, -torch.inf)


def make_flash_attn() -> ModuleType:
    """A replacement for flash_attn.flash_attn_interface that calls the same CPU op as ringattn's CPU kernel.

    Tensors are [B, N, H, D].
    """

    def forward(
        q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None,
        return_softmax: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert not dropout_p, "the stand-in has no dropout"
        if window_size_left >= 0:
            scores = _score(q, k, softmax_scale, causal, window_size_left)
            out = scores.softmax(-1).nan_to_num(0.0) @ v.transpose(1, 2)
            return out.transpose(1, 2), scores.logsumexp(-1), None, None
        return *_flash_for_torchscale(q, k, v, 0.0, None, softmax_scale, causal), None, None

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False, rng_state: Any = None,
    ) -> None:  # fmt: skip
        heads_first = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
        if window_size_left >= 0:
            weights = (_score(q, k, softmax_scale, causal, window_size_left) - softmax_lse[..., None]).exp()
            dout, q, k, v, out = heads_first
            by_score = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * softmax_scale
            grads = by_score @ k, by_score.mT @ q, weights.mT @ dout
        else:
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


#: Ours first. A library in one process computes the whole sequence with two threads; a rank has one thread.
PEERS: dict[str, BenchColumn] = {
    column.name: column
    for column in (
        BenchColumn("ringattn", 1, partial(calls.make_ring, schedule="auto")),
        BenchColumn("sdpa", RANKS, _make_sdpa),
        # While tensors are counted, FlexAttention is not compiled, and holds more than the compiled call.
        BenchColumn("FlexAttention", RANKS, _make_flex, weighed=False),
        *(BenchColumn(name, 1, partial(_make_template, rotate=rotate)) for name, rotate in TEMPLATES.items()),
        BenchColumn("ring-flash-attn", 1, _make_ring_flash_attn),
        BenchColumn("ring-attention-pytorch", 1, _make_ring_attention_pytorch),
        BenchColumn("torchscale", 1, _make_torchscale),
    )
}


def list_cases(tokens: int = TOKENS) -> list[BenchCase]:
    """The cases of this suite: five masks, each with a forward, and with forward and backward.

    Dense and causal masks are also measured in bf16.
    """
    masks = [(name, mask, "float32") for name, mask in _list_masks(tokens).items()]
    masks += [(name, mask, "bfloat16") for name, mask, _ in masks[:2]]
    return [_case(*mask, tokens, backward) for mask in masks for backward in (False, True)]


def _case(name: str, mask: Mask, dtype: str, tokens: int, backward: bool) -> BenchCase:
    settings = make_settings(
        tokens, dtype, mask=name, pattern=repr(mask.pattern), backward=backward, causal=name == "causal",
        layout=LAYOUTS.get(name, "contiguous"), target=TARGETS[name],
    )  # fmt: skip
    return BenchCase(
        f"{name}{'' if dtype == 'float32' else f'_{dtype}'}_{'backward' if backward else 'forward'}",
        RANKS,
        settings,
        tuple(PEERS.values()),
        tuple(Ratio(peer, "ringattn") for peer in PEERS if peer != "ringattn"),
        check,
        notes=(NOTE,),
        summarise=judge,
        lacking=CANNOT_RUN,
    )


def check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """On rank 0, the largest relative error of each library against dense attention in fp64."""
    exact = compute_dense(context) if context.rank == 0 else []
    errors = {}
    for name, tensors in results.items():
        if PEERS[name].threads == 1:
            layout = calls.get_layout(context, "contiguous" if name == "ring-attention-pytorch" else None)
            tensors = [calls.gather(x, layout) for x in tensors]
        if context.rank == 0:
            errors[name] = max(map(calls.relative_error, tensors, exact))
    return errors


def compute_dense(context: Context) -> list[torch.Tensor]:
    """Dense attention in fp64, head by head: the output, and with a backward the gradients of q, k and v."""
    settings, inputs = context.settings, calls.make_inputs(context.settings, 4)
    seen = torch.from_numpy(_get_mask(context).pattern.mask(settings["tokens"], HEADS) > 0)
    parts = []
    for h in range(HEADS):
        q, k, v, grad = (x[:, h : h + 1].double() for x in inputs)
        attend = partial(scaled_dot_product_attention, attn_mask=seen[h])
        parts.append(calls.make_pass(attend, [q, k, v], grad if settings["backward"] else None)())
    return [torch.cat(heads, 1) for heads in zip(*parts, strict=True)]


def judge(record: CaseRecord) -> dict[str, Any]:
    """The fastest other library with correct results, and its time divided by ringattn's, round by round."""
    ratios = {one["ratio"].removesuffix(" / ringattn"): one["median"] for one in record["ratios"]}
    best, target = min(ratios, key=lambda name: ratios[name], default="none"), record["settings"]["target"]
    ratio = ratios.get(best, 0.0)
    return {"fastest right peer": best, "peer / ringattn": ratio, "target": target, "met": ratio >= target}


def conclude(records: list[CaseRecord]) -> tuple[str, bool]:
    """A sentence on how often ringattn beats the fastest correct library by the promised factor; and whether always."""
    met = sum(record.get("summary", {}).get("met", False) for record in records)
    text = f"as fast as promised against the fastest right peer in {met} of {len(records)} cases"
    return text, met == len(records)


SUITE = BenchSuite(
    list_cases,
    conclude,
    title="Other libraries against ours",
    about=(
        "The same tensors, threads and machine, in turns: batch 1, 8 heads of 64, 4,096 tokens, fp32 or bf16. A "
        "library that cannot run here, or whose result is wrong, has a row that says so. Targets, the time of the "
        f"fastest right peer over ours: {', '.join(f'{mask} {target:g}' for mask, target in TARGETS.items())}.",
    ),
)
