"""Tiny transformers of diffusers on real ranks against the same model on one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from rank_pool import told_by
from torch.distributed.device_mesh import DeviceMesh

from ringattn.integrations.diffusers import NAME, parallelize

Case = tuple[torch.nn.Module, dict[str, Any]]


def flux(text: int, image: int) -> Case:
    """Joint attention of text and image."""
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=6,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    place = torch.arange(image)
    return model, {
        "hidden_states": torch.randn(2, image, 4),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.stack([0 * place, place // 5, place % 5], -1).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def video(kind: str, text: int, image: int, **more: Any) -> Case:
    """A model of Wan's shape, with `image` tokens of one frame."""
    model = getattr(diffusers, kind)(
        num_attention_heads=6, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, **more,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 1, 2, 2 * image),
        "encoder_hidden_states": torch.randn(1, text, 16),
        "timestep": torch.tensor([500]),
    }


def wan(text: int, image: int) -> Case:
    """Cross-attention over text that is whole on every rank."""
    return video("WanTransformer3DModel", text, image)


def helios(text: int, image: int) -> Case:
    """Tokens are gathered and cut again around every attention."""
    off = dict.fromkeys(("has_multi_term_memory_patch", "zero_history_timestep", "guidance_cross_attn"), False)
    model, inputs = video("HeliosTransformer3DModel", text, image, rope_dim=(4, 4, 4), **off)
    plan = model._cp_plan  # names 40 layers
    model._cp_plan = {name: place for name, place in plan.items() if re.match(r"blocks\.[*01]\.|[^b]", name)}
    return model, {**inputs, "indices_hidden_states": torch.zeros(1, 1, dtype=torch.long)}


def qwen(text: int, image: int) -> Case:
    """Joint attention with padded text: one rank holds no token of the second prompt's end."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=6,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, image, 4),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "encoder_hidden_states_mask": torch.arange(text) < torch.tensor([[text], [text - 3]]),
        "timestep": torch.rand(2),
        "img_shapes": [[(1, 1, image)]] * 2,
    }


def ltx(text: int, image: int) -> Case:
    """Cross-attention over text that is cut over ranks."""
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=6, attention_head_dim=12, cross_attention_dim=72,
        num_layers=1, caption_channels=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, image, 4),
        "encoder_hidden_states": torch.randn(1, text, 32),
        "timestep": torch.rand(1),
        "encoder_attention_mask": None,
        **{"num_frames": 1, "height": 1, "width": image},
    }


MODELS: dict[str, Callable[[int, int], Case]] = {"Flux": flux, "Wan": wan, "Helios": helios, "Qwen": qwen, "LTX": ltx}


def agreements(
    rank: int, ranks: int, names: list[str], ulysses: int, text: int, image: int
) -> list[tuple[float, float]]:
    """The largest differences of output and of gradients from one device, each relative to its largest value.

    The first `ranks` ranks compute, in groups of `ulysses`; others find nothing. Gradients are means over ranks, and
    those of small tensors are relative to 1e-3.
    """
    found: list[tuple[float, float]] = []
    degrees = {"ring_degree": ranks // ulysses, "ulysses_degree": ulysses}
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(*degrees.values()), mesh_dim_names=("ring", "ulysses"))
    whole_mesh = mesh["ring", "ulysses"]._flatten()
    for name in names if rank < ranks else []:
        torch.manual_seed(0)
        alone, inputs = MODELS[name](text, image)
        inputs["hidden_states"].requires_grad_()
        model, mine = deepcopy(alone), deepcopy(inputs)
        config = ContextParallelConfig(**degrees, mesh=mesh)
        assert parallelize(model, config) is model and not config.ring_anything
        outs = [one(**given, return_dict=False)[0] for one, given in ((alone, inputs), (model, mine))]
        grad = torch.randn(outs[0].shape)
        for out in outs:
            out.backward(grad)
        worst = 0.0
        leaves = [(x["hidden_states"], *one.parameters()) for one, x in ((alone, inputs), (model, mine))]
        for whole, own in zip(*leaves, strict=True):
            wanted, mean = (torch.zeros_like(x) if x.grad is None else x.grad for x in (whole, own))
            dist.all_reduce(mean, group=whole_mesh.get_group())
            error = (mean / ranks - wanted).abs().max()
            worst = max(worst, float(error / wanted.abs().max().clamp(min=1e-3)))
        found.append((float((outs[1] - outs[0]).detach().abs().max() / outs[0].detach().abs().max()), worst))
    return found


def selected(rank: int) -> list[float]:
    """The error of the backend where diffusers' own calls select it; shards are alike, as its hooks need with Gloo."""
    errors = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.accelerator, "device_count", lambda: 1)  # diffusers divides by it
        for degrees in ({"ring_degree": 3}, {"ulysses_degree": 3}):
            model, inputs = flux(9, 12)
            wanted = model(**inputs, return_dict=False)[0]
            model.set_attention_backend(NAME)
            assert torch.allclose(model(**inputs, return_dict=False)[0], wanted)
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
            errors.append(float((model(**inputs, return_dict=False)[0] - wanted).abs().max()))
    return errors


def mistakes(rank: int) -> dict[str, str]:
    """What the ranks are told where they, or a user, are at odds."""
    config, told = ContextParallelConfig(ring_degree=3), {}
    changes: dict[str, dict[str, Any]] = {
        "noise": {"hidden_states": torch.randn(2, 11, 4) + 9 * rank},
        "text": {"txt_ids": torch.zeros(7 + rank, 3)},
        "few": {"encoder_hidden_states": torch.randn(2, 1, 32), "txt_ids": torch.zeros(1, 3)},
    }
    for name, more in changes.items():
        torch.manual_seed(0)
        model, inputs = flux(7, 11)
        parallelize(model, config)
        told[name] = told_by(partial(model, **{**inputs, **more}))
    told["alike"] = told_by(partial(model, **inputs))
    with torch.no_grad():
        model.proj_out.weight.mul_(1 + 0.01 * rank)
        told["compared before"] = told_by(partial(model, **inputs))
    told["weights"] = told_by(partial(model, **inputs))
    told["again"] = told_by(partial(parallelize, model, config))
    told["degrees"] = told_by(partial(parallelize, flux(7, 11)[0], ContextParallelConfig(3, 2)))
    return told


def sample_of_the_page(rank: int, page: str) -> dict[str, Any]:
    """What the sample of a page, which is for 2 ranks, leaves on 3."""
    (sample,) = (
        x
        for x in re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
        if "FluxTransformer2DModel" in x
    )
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *arguments: None)
        exec(sample.replace("ring_degree=2", "ring_degree=3"), names)
    return {name: float(names[name]) for name in ("loss", "norm")}
