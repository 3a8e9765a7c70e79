"""`check`: is a parallelized model of transformers its eager self, forward and backward?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput, Mismatch
from ..functional import get_transport
from ..transport.records import ErrorReport
from .batches import POSITIONS, cut_batch, gather_logits, shard_batch
from .generation import STATE, layer_windows
from .supported import rotates_by_length, unwrap_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Agreement:
    """How far a parallelized model is from its eager self: the largest differences of logits and of gradients.

    `logits` and `gradients` are relative to the largest value of the eager model; `bound` is what rounding explains.
    `unseen` is what the comparison did not look at.
    """

    logits: float
    gradients: float
    bound: float
    tokens: int
    unseen: tuple[str, ...]


def check(model: PreTrainedModel, tokens: int = 64, *, seed: int = 0) -> Agreement:
    """Compare a parallelized model with its eager self on the ranks at hand, forward and backward. Collective.

    Of a model without a head the last hidden states are compared in place of logits. `Agreement.unseen` names what is
    not compared.

    Two random packed documents of together `tokens` tokens run through the ring, and each document alone through the
    model's own eager attention, which is computed whole on every rank (an encoder is given one document, its decoder
    two thirds of it). Takes the memory of two copies of the gradients. A sliding window of W keys is tested only where
    the first document has more than W tokens: raises InvalidInput for fewer `tokens`. Raises Mismatch on every rank if
    logits or gradients differ by more than rounding, or if the ranks differ in `tokens` or `seed`.
    """
    model = unwrap_adapters(model)
    ring: Any = getattr(model, STATE, None)
    long, ours = max(filter(None, layer_windows(model)), default=0), model.config._attn_implementation
    if ring is None:
        raise InvalidInput("this model is not parallelized; call parallelize(model, group, layout=...) first")
    group, first = ring.place.group, max(tokens * 2 // 3, 1)
    with ErrorReport(get_transport(group), POSITIONS):
        if tokens < 3:
            raise InvalidInput(f"check: {tokens} tokens are too few for two documents; try tokens=64")
        if first <= long:
            raise InvalidInput(
                f"check: a window of {long:,} keys hides nothing in a document of {first:,} tokens; "
                f"try tokens={3 * (long + 2) // 2 + 1}"
            )
    config, device = model.config.get_text_config(), next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator, device="cpu").to(device)
    ids[ids == config.pad_token_id] = config.vocab_size // 2  # some models give no position to this token
    borders, decoded, rows = [0, first, tokens], {}, tokens
    if ring.crosses:
        borders, decoded, rows = [0, tokens], {"decoder_input_ids": ids.flip(1)[:, :first]}, first
    batch = shard_batch(
        {"input_ids": ids, **decoded}, group, layout=ring.layout, cu_seqlens=None if ring.crosses else borders
    )
    cut = cut_batch(ring.layout, rows, dist.get_world_size(group), batch.get("cu_seq_lens_q"))
    whole = [module for module in model.modules() if not rotates_by_length(module)]
    training, sequences = model.training, ring.pooling not in (None, "rows")
    model.eval()
    try:
        local = _rows_of(model(**batch, use_cache=False))
        shape = local.shape if sequences else (1, rows, local.shape[-1])
        weights = torch.randn(shape, generator=generator, device="cpu").to(device)
        if ring.pooling is None:
            mine = cut.shard_tensor(weights, dist.get_rank(group), dim=1)
            logits = gather_logits(local, group, layout=cut)
        else:  # every rank has them all
            mine, logits = weights / cut.ranks, local.detach()
        gradients = _gradients(model, (local.float() * mine).sum() / tokens)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        model.set_attn_implementation("eager")
        for module in whole:  # the others keep theirs: rope takes the length of the batch
            setattr(module, STATE, None)
        parts = [_rows_of(model(ids[:, a:b], use_cache=False, **decoded)) for a, b in pairwise(borders)]
        right = torch.cat(parts, 0 if sequences else 1)
        expected = _gradients(model, (right.float() * weights).sum() / tokens)
    finally:
        for module in whole:
            setattr(module, STATE, ring)
        model.set_attn_implementation(ours)
        model.train(training)
    unseen = "padding", "labels and loss", "dropout", "gradient checkpointing", "generate", *["the pooler"] * ring.pools
    bound = 256 * max(torch.finfo(right.dtype).eps, 2**-23)  # models of fp64, too, have their softmax in fp32
    result = Agreement(_difference([logits], [right.detach()]), _difference(gradients, expected), bound, tokens, unseen)
    worst: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(worst, max(result.logits, result.gradients), group=group)
    if not max(worst) <= bound:
        raise Mismatch(
            f"the parallelized model is not its eager self: logits differ by {result.logits:.2g}, gradients by "
            f"{result.gradients:.2g} of the largest, rounding explains {bound:.2g}; do not train with this model"
        )
    return result


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """d loss / d parameter of every parameter that the loss reaches or could reach."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a fraction of the largest value of all of `theirs`."""
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / max(largest, 1e-30)


def _rows_of(result: Any) -> torch.Tensor:
    """What a model says of each row or sequence: its logits, without a head its last hidden states."""
    if "start_logits" in result:
        return torch.stack([result["start_logits"], result["end_logits"]], -1)
    return cast(torch.Tensor, result["logits" if "logits" in result else "last_hidden_state"])
