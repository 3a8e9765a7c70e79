"""`parallelize(loss="chunked")` on packed documents, against the loss that transformers computes in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from rank_pool import told_by
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringattn as ra
from ringattn.integrations import chunked
from ringattn.integrations.batches import LayerMasks
from ringattn.integrations.transformers import parallelize, shard_batch

CLASSES, ROWS, TOKENS = 97, 7, 61
SIZES: dict[str, Any] = dict(
    vocab_size=CLASSES, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, sliding_window=9, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip
#: Heads that cap, scale and tie their logits, and one whose loss has a part of its own.
MODELS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": dict(final_logit_softcapping=2.0),
    "GraniteForCausalLM": dict(logits_scaling=3.0),
    "GptOssForCausalLM": dict(
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5
    ),
}


def make(kind: str) -> Any:
    torch.manual_seed(1)
    model = getattr(hf, kind)
    made = model(model.config_class(**SIZES, **MODELS[kind], attn_implementation="eager"))
    made.config._experts_implementation = "eager"  # the default takes no fp64
    return made


def make_batch() -> dict[str, torch.Tensor]:
    """Packed documents, some of whose labels are ignored, also all those of a rank."""
    numbers = torch.Generator().manual_seed(2)
    documents = [torch.randint(3, CLASSES, (n,), generator=numbers) for n in (20, 1, 9, 50)]
    batch = next(ra.train.pack(documents, TOKENS))
    batch["labels"][0, 3:40:4] = -100
    return batch


def packed_masks(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The masks of full layers and of those with a window."""
    places = torch.arange(batch["position_ids"].shape[1])
    number = (batch["position_ids"][0] == 0).cumsum(0)
    seen = (number[:, None] == number) & (places <= places[:, None])
    near = seen & (places > places[:, None] - SIZES["sliding_window"])
    return [torch.zeros(x.shape).masked_fill(~x, -torch.inf).double()[None, None] for x in (seen, near)]


class Logits(TorchDispatchMode):
    """Sees the most rows of logits that a tensor has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.shape[-1:] == (CLASSES,) and x.shape != (32, CLASSES):
                self.most = max(self.most, x.numel() // CLASSES)
        return result


@contextmanager
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "LOGITS", ROWS * CLASSES)
        yield


def compare(rank: int, kind: str, whole: bool, sharded: bool) -> tuple[float, float, float, int, bool]:
    """Relative differences of loss, gradients and loss without gradients; rows of logits; whether there are logits."""
    batch, alone, model = make_batch(), make(kind).double(), make(kind)
    patch = pytest.MonkeyPatch()
    if "Oss" in kind:  # alone, it lets packed documents see each other
        made = packed_masks(batch)
        space = sys.modules[type(alone).__module__]
        patch.setattr(space, "create_causal_mask", lambda *args, **kwargs: made[0])
        patch.setattr(space, "create_sliding_window_causal_mask", lambda *args, **kwargs: made[1])
    expected = alone(**batch, use_cache=False).loss
    patch.undo()
    expected.backward()
    layout: Any = "balanced" if whole else LayerMasks.of(model)
    parallelize(model, layout=layout, whole=whole, loss="chunked")
    if sharded:
        fully_shard(model.model.layers[0])
        fully_shard(model)
    own = batch if whole else shard_batch(batch, layout=layout)
    with small_chunks(), Logits() as seen:
        with torch.no_grad():
            quiet = ra.train.mean_over_ranks(model(**own, use_cache=False).loss)
        result = model(**own, use_cache=False)
        result.loss.backward()
    far = 0.0
    for p, truth in zip(model.parameters(), alone.parameters(), strict=True):
        found = p.grad.full_tensor() if sharded else ra.train.mean_over_ranks(p.grad)
        far = max(far, float((found - truth.grad).abs().max() / truth.grad.abs().max()))
    losses = ra.train.mean_over_ranks(result.loss), quiet
    one, other = (abs(float(x) / float(expected) - 1) for x in losses)
    return one, far, other, seen.most, result.get("logits") is not None


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_are_those_of_all_logits(run_ranks, ranks: int) -> None:  # type: ignore[no-untyped-def]
    cases = [(kind, whole, False) for kind in MODELS for whole in (True, False)] + [("Gemma3ForCausalLM", True, True)]
    for case in cases:
        for loss, gradients, quiet, rows, logits in run_ranks(compare, ranks, *case):
            assert loss < 1e-5 and gradients < 1e-4 and quiet < 1e-5, (case, loss, gradients, quiet)
            assert rows == ROWS and not logits, (case, rows)


def refused(rank: int) -> list[str]:
    """What is said to other words and models, and to a head that is sharded apart; then whether generation works."""
    small = {**SIZES, "layer_types": None, "head_dim": None, "max_position_embeddings": 64}
    bert, opt = (
        hf.BertForMaskedLM(hf.BertConfig(**small)),
        hf.OPTForCausalLM(hf.OPTConfig(**small, word_embed_proj_dim=32)),
    )
    said = [
        told_by(lambda: parallelize(make("GraniteForCausalLM"), layout="zigzag", loss="chunks")),
        told_by(lambda: parallelize(bert, layout="zigzag", loss="chunked")),
    ]
    apart = parallelize(make("GptOssForCausalLM"), layout="balanced", whole=True, loss="chunked")
    fully_shard(apart.lm_head)
    fully_shard(apart)
    parallelize(opt, layout="balanced", whole=True, loss="chunked")
    for model in (apart, opt):
        said.append(told_by(lambda: model(**make_batch(), use_cache=False)))
    assert dist.get_world_size() == 2
    return said


@pytest.mark.multi
def test_what_has_no_loss_in_chunks_is_refused(run_ranks) -> None:  # type: ignore[no-untyped-def]
    words = [
        "InvalidInput: loss='chunks': expected 'whole', or 'chunked' for a loss without the logits of all rows",
        "Unsupported: loss='chunked': BertForMaskedLM has no head that takes logits_to_keep; leave it out",
        "Unsupported: loss='chunked': FSDPGptOssForCausalLM has a head that is sharded apart; leave loss out",
        "Unsupported: loss='chunked': OPTForCausalLM calls only a part of its 'model'; leave loss out",
    ]
    for said in run_ranks(refused, 2):
        assert len(said) == len(words)
        for found, expected in zip(said, words, strict=True):
            assert found.startswith(expected), found
