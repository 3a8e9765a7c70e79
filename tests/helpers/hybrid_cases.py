"""What the ranks of test_hybrids.py run."""

from __future__ import annotations

import contextlib
import copy
import io
import runpy
import sys
import warnings
from functools import wraps
from pathlib import Path
from typing import Any

from generation_cases import WAYS, far, generate, prompts
from rank_pool import of_first, told_by
from sweep import classes, fit, make_ids
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ringattn.integrations.transformers import Agreement, RingCache, check, parallelize, shard_batch


def tiny(name: str) -> Any:
    """A tiny model of a class, which ends at no token."""
    warnings.simplefilter("ignore")
    model, *_ = fit(name, classes()[name], make_ids()[:1])
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def pair(name: str) -> tuple[Any, Any]:
    """A model alone and the same on these ranks."""
    model = tiny(name)
    return model, parallelize(copy.deepcopy(model), layout="zigzag")


def generations(rank: int, name: str) -> dict[str, float]:
    """The largest difference of logits of each way to generate; infinity for other tokens."""
    alone, model = pair(name)
    cases = {"greedy": prompts(1, 37), "padded": prompts(2, 29, 6), "beams": prompts(2, 23), "chunked": prompts(1, 37)}
    if name in ("MambaForCausalLM", "ZambaForCausalLM"):
        del cases["chunked"]
    if name.startswith("Lfm2"):
        cases["lookup"] = prompts(1, 23)
    found = {}
    for way, inputs in cases.items():
        options = {**inputs, **WAYS.get(way, {}), "max_new_tokens": 32 if way == "greedy" else 10}
        right = of_first(lambda options=options: generate(alone, **options))  # type: ignore[misc]
        found[way] = far(generate(model, **options), right)
    return found


def checks(rank: int) -> Agreement:
    """A comparison of a hybrid with itself; bf16 Mamba, whose forward uses weights of modules that it does not call."""
    check(parallelize(tiny("MambaForCausalLM").bfloat16(), layout="zigzag"))
    return check(pair("Qwen3NextForCausalLM")[1])


def example(rank: int, layout: str) -> list[tuple[float, float]]:
    """The losses and gradient norms of examples/hybrid.py."""
    train = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/hybrid.py"))["train"]
    with contextlib.redirect_stdout(io.StringIO()):
        return train(layout, 3)


def refusals(rank: int) -> list[str]:
    """What calls raise that do not compose."""
    _, gdn = pair("Qwen3NextForCausalLM")
    _, mamba = pair("MambaForCausalLM")
    _, jamba = pair("JambaForCausalLM")
    ids = make_ids()

    def add_function() -> None:
        space = vars(sys.modules[type(gdn).__module__])

        @wraps(space["l2norm"])
        def lightning_rule() -> None: ...

        lightning_rule.__code__ = lightning_rule.__code__.replace(co_filename="hub_kernels.py")
        space["lightning_rule"] = lightning_rule
        try:
            parallelize(tiny("Qwen3NextForCausalLM"), layout="zigzag")
        finally:
            del space["lightning_rule"]

    def stripe() -> None:
        model = parallelize(tiny("Qwen3NextForCausalLM"), layout="striped(1)")
        batch = shard_batch({"input_ids": ids[:, :24].repeat(1, 2)}, layout="striped(1)")
        model(**batch)

    def crop() -> None:
        past = RingCache(gdn)
        gdn.generate(ids[:1, :20], max_new_tokens=2, past_key_values=past)
        past.crop(-1)

    def recompute() -> None:
        layers = mamba.backbone.layers
        layers[0], plain = checkpoint_wrapper(layers[0]), layers[0]
        try:
            batch = shard_batch({"input_ids": ids}, layout="zigzag", cu_seqlens=[[0, 17, 41], [0, 41]])
            mamba(**batch).logits.sum().backward()
        finally:
            layers[0] = plain

    calls = [
        lambda: parallelize(tiny("MiniMaxForCausalLM"), layout="zigzag"),
        add_function,
        lambda: parallelize(tiny("Qwen3NextForCausalLM"), layout="zigzag", reproducible=16),
        stripe,
        lambda: gdn.generate(**prompts(2, 3, 1), max_new_tokens=2),
        lambda: jamba.generate(ids[:1, :30], max_new_tokens=2, prefill_chunk_size=11),
        crop,
        recompute,
        lambda: gdn.generate(ids[:1, :20], max_new_tokens=2),
    ]
    return [told_by(call) for call in calls]
