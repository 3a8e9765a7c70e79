"""Check that a parallelized transformers model matches itself on one rank, forward and backward, and mixes no rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

from ..call.functional import get_transport
from ..errors import InvalidInput, Mismatch, Unsupported
from ..train import NO_LABEL
from ..transport.records import ErrorReport, exchange_values
from .batches import POSITIONS, cut_batch, shard_batch
from .encoder_decoder import CROSS, find_tables
from .generation import ROWS, STATE, chooses_keys, layer_windows
from .heads import FOREIGN
from .hybrids import each_row_alone
from .ranks import gather_logits
from .supported import rotates_by_length, scale_by_position, unwrap_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: How many tokens `check_rows` runs together in evaluation and in training mode, how many of these are left padding,
#: and how many tokens it runs alone.
TOKENS, TRAINED, PADDED, ALONE = 32, 97, 3, 8
#: What `check` does not compare.
UNSEEN = ("training mode", "later calls", "padding", "labels and loss", "dropout", "gradient checkpointing", "generate")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Agreement:
    """How much a parallelized model differs from the same model on one rank with the attention that it had before.

    `logits` and `gradients` are the largest differences, relative to the largest value of the model on one rank.
    `bound` is the largest difference that rounding can explain. `unseen` names what was not compared.
    """

    logits: float
    gradients: float
    bound: float
    tokens: int
    unseen: tuple[str, ...]


def check(model: PreTrainedModel, tokens: int = 64, *, seed: int = 0) -> Agreement:
    """Check that a parallelized model gives the logits and gradients that it has on one rank. Collective.

    Each rank compares the ring with the attention the model had, such as sdpa, on two random packed documents of
    `tokens` tokens in total: it also runs each document alone, without other ranks. For an encoder-decoder model, the
    encoder gets one document, and the decoder two thirds of it. For a model without a head, the last hidden states are
    compared, not logits. `Agreement.unseen` names what is not compared. Takes memory for two copies of the gradients.

    Raises Mismatch on every rank if logits or gradients differ by more than rounding, or if `tokens` or `seed` differ
    between ranks. Raises InvalidInput if a sliding window of W keys would not be tested because the first document has
    at most W tokens; give more `tokens`.
    """
    model = unwrap_adapters(model)
    ring: Any = getattr(model, STATE, None)
    long, ours = max(filter(None, layer_windows(model).values()), default=0), model.config._attn_implementation
    if ring is None:
        raise InvalidInput("this model is not parallelized; call parallelize(model, group, layout=...) first")
    group, first = ring.place.group, max(tokens * 2 // 3, 1)
    transport = get_transport(group)
    with ErrorReport(transport, POSITIONS):
        if tokens < 3:
            raise InvalidInput(f"check: tokens={tokens} is too few for two documents; try tokens=64")
        if first <= long:
            words = f"check: a window of {long:,} keys hides nothing in a document of {first:,} tokens"
            raise InvalidInput(f"{words}; try tokens={3 * (long + 2) // 2 + 1}")
    config, device = model.config.get_text_config(), next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator, device="cpu").to(device)
    ids[ids == config.pad_token_id] = config.vocab_size // 2  # some models give this token no position
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
        else:  # every rank has all logits
            mine, logits = weights / cut.ranks, local.detach()
        gradients = _gradients(model, (local.float() * mine).sum() / tokens)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        model.set_attn_implementation(ring.before)
        for module in whole:  # the other modules are ropes that need the length of the batch
            setattr(module, STATE, None)
        parts = [_rows_of(model(ids[:, a:b], use_cache=False, **decoded)) for a, b in pairwise(borders)]
        right = torch.cat(parts, 0 if sequences else 1)
        expected = _gradients(model, (right.float() * weights).sum() / tokens)
    finally:
        for module in whole:
            setattr(module, STATE, ring)
        model.set_attn_implementation(ours)
        model.train(training)
    unseen = UNSEEN + ("the pooler",) * ring.pools
    dtypes = {x.dtype for x in (right, *model.parameters()) if x.is_floating_point()}  # bf16 Mamba has fp32 logits
    bound = 256 * max(2**-23, *(torch.finfo(dtype).eps for dtype in dtypes))  # fp64 models have softmax in fp32
    result = Agreement(_difference([logits], [right.detach()]), _difference(gradients, expected), bound, tokens, unseen)
    worst = exchange_values(transport, "check", max(result.logits, result.gradients), float)
    if not all(one <= bound for one in worst):
        raise Mismatch(
            f"the parallelized model does not compute what it computed before with {ring.before}; do not train it: "
            f"relative to the largest value, logits differ by {result.logits:.2g} and gradients by "
            f"{result.gradients:.2g}; rounding explains at most {bound:.2g}"
        )
    return result


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
) -> tuple[Tensor, None]:
    """Stand-in for attention: each output row depends only on its own query, key and value."""
    gate = torch.tanh(scale_by_position(module, query).mean(-1, keepdim=True))
    if getattr(module, CROSS, False) or key.shape[2] != query.shape[2]:
        out = gate.expand(*gate.shape[:-1], value.shape[-1])
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = value * (1 + gate + torch.tanh(key.mean(-1, keepdim=True)))
    return out.transpose(1, 2).contiguous(), None


def _mask_rows(
    *, batch_size: int, q_length: int, kv_length: int, config: Any = None, device: Any = None, **others: Any
) -> Tensor | None:
    """A mask for indexers, which need one; None for other models, as if there was no function of this name."""
    if config is None or not chooses_keys(config):
        return None
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)


AttentionInterface.register(ROWS, _attend_rows)
AttentionMaskInterface.register(ROWS, _mask_rows)


@contextmanager
def _in_fp32(model: nn.Module) -> Iterator[None]:
    """A context where each module runs with its 16-bit weights in fp32, one module at a time."""
    narrow: list[list[tuple[nn.Parameter, Tensor]]] = []

    def widen(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        own = [*module.parameters(recurse=False)]
        # Mamba's mixer uses weights of modules that it does not call; its block reads the dtype of a norm's weight.
        others = [p for child in module.children() for p in child.parameters(recurse=False) if own or p.ndim == 1]
        narrow.append([(p, p.data) for p in (*own, *others) if p.dtype in HALF])
        for p, x in narrow[-1]:
            p.data = x.float()
        # The head of Mamba gets the dtype that its weight has before it is called.
        return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in given)

    def restore(*_: Any) -> None:
        for p, x in narrow.pop():
            p.data = x

    with ExitStack() as after:
        after.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        after.callback(lambda: list(map(restore, list(narrow))))  # after an error
        for module in model.modules():
            after.enter_context(module.register_forward_pre_hook(widen))
            after.enter_context(module.register_forward_hook(restore))
        yield


class _Steady(TorchDispatchMode):
    """A context where dropout keeps every value, and other random tensors have one value, the same in each call."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **(kwargs or {}))
        if function is torch.ops.aten.native_dropout.default:
            return function(*args[:2], False)
        torch.manual_seed(0)
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel():
            out.fill_(1 if "bernoulli" in str(function) else out.flatten()[0])
        return out


def check_rows(model: PreTrainedModel, ring: Any, run: Callable[..., Any]) -> None:
    """Raise Unsupported if a model mixes the rows of different tokens outside of transformers' attention functions.

    `run` is the model or its forward. It computes a few tokens together with attention left out, and then some of them
    alone: the results must be equal. It does this in evaluation mode, and for more tokens in training mode, with labels
    and padding, but without dropout. Modes, buffers, gradients and random generators are unchanged. Sends no messages.
    """
    device, before = model.device, model.config._attn_implementation
    states = [(module, {**vars(module), "_buffers": {**module._buffers}}) for module in model.modules()]
    tables = set(find_tables(model).values()) if ring.crosses else set()
    buffers, quantized = [(x, x.clone()) for x in model.buffers()], getattr(model, "hf_quantizer", None) is not None
    try:
        for module, _ in states:
            setattr(module, STATE, ring if module in tables else None)
        model.set_attn_implementation(ROWS)
        with (
            torch.no_grad(), torch.autocast(device.type, enabled=False), each_row_alone(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            nullcontext() if quantized else _in_fp32(model),
        ):  # fmt: skip
            found = [_compare_rows(model.train(long > TOKENS), ring, run, long) for long in (TOKENS, TRAINED)]
    except FOREIGN as error:
        words = f"{type(model).__name__}, {TOKENS} and {TRAINED} tokens: {type(error).__name__}: {error}"
        raise Unsupported(f"{words}; compare=False skips this test, which looks for layers that mix rows") from error
    finally:
        for module, state in states:
            vars(module).update(state)
        for x, value in buffers:
            x.copy_(value)
        model.set_attn_implementation(before)
    bound = 2**-3 if quantized else 2**-11
    for (far, loss), words in zip(found, ("", ", in training mode with labels and padding"), strict=True):
        # Rounding may send one row to another expert, or many rows if weights are quantized.
        if far[len(far) // 2 if quantized else -2] > bound or (far[-1] <= bound and not loss <= bound):
            raise Unsupported(
                f"{type(model).__name__} mixes rows outside of attention functions{words}: a row or a loss changes if "
                f"only other tokens do, by {max(float(far[-1]), loss):.2g} of the largest value. Look for a "
                "convolution, a shift, a mean or a selection over tokens, positions that are not position_ids, or a "
                "layer's own attention or loss; shard the batch instead"
            )


def _compare_rows(model: PreTrainedModel, ring: Any, run: Callable[..., Any], tokens: int) -> tuple[Tensor, float]:
    """How far rows together are from rows alone, sorted, and the loss of some rows; relative to the largest value."""
    config, device, taken = model.config.get_text_config(), model.device, inspect.signature(model.forward).parameters
    tokens, numbers = min(tokens, getattr(config, "max_position_embeddings", None) or tokens), torch.Generator()
    ids = torch.randint(config.vocab_size, (tokens,), generator=numbers.manual_seed(0), device="cpu")
    order = PADDED + torch.randperm(tokens - 1 - PADDED, generator=numbers, device="cpu")
    special = [x for word, x in vars(config).items() if word.endswith("_token_id") and isinstance(x, int)]
    for place, token in zip(order[ALONE:], special, strict=False):
        ids[place] = token % config.vocab_size
    ids[ids == getattr(config, "pad_token_id", None)] = config.vocab_size // 2  # as in `check`
    last = torch.tensor([tokens - 1], device="cpu")  # the largest position, which some ropes depend on
    some = torch.cat([order[:ALONE], last])
    real = (torch.arange(tokens, device="cpu") >= PADDED).long()
    labels = torch.full_like(ids, NO_LABEL).scatter(0, some, ids[some] % max(model.config.num_labels, 1))
    below: list[Any] = []

    def rows_of(places: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model on the tokens at `places` [B, n] alone; returns their results [B * n, d] and the loss."""
        here, given = places.to(device), ids[places].to(device)
        ring.call.places = {"encoder": here[0], "decoder": here[0]}
        more = {"position_ids": here + ring.first, "decoder_position_ids": here, "decoder_input_ids": given}
        if model.training:
            mask, wanted = real[places].to(device), labels[places].to(device)
            more |= {"attention_mask": mask, "decoder_attention_mask": mask, "output_router_logits": False}
            more |= {} if ring.shift is None else {"labels": wanted, "shift_labels": wanted}
        kept = {word: x for word, x in more.items() if word in taken or (word == "shift_labels" and ring.shift)}
        with _Steady():
            result = run(input_ids=given, **kept)
        parts = [_rows_of(result if ring.pooling is None else below[-1])]
        if "encoder_last_hidden_state" in result:
            parts.append(result["encoder_last_hidden_state"])
        loss = result.get("loss") if ring.pooling is None else None
        return torch.cat(parts, -1).flatten(0, 1), parts[0].new_zeros(()) if loss is None else loss

    with model.base_model.register_forward_hook(lambda *given: below.append(given[-1])):
        whole, loss = rows_of(torch.arange(tokens, device="cpu")[None])
        alone, losses = zip(*(rows_of(p[:, None]) for p in some.split(1 if ring.crosses else len(some))), strict=True)
    far = (whole[some] - torch.cat(alone)).abs().amax(-1) / whole[some].abs().max().clamp(min=1e-30)
    return far.float().sort().values, float((loss - torch.stack(losses).mean()).abs() / loss.abs().clamp(min=1e-30))


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The gradient of each trainable parameter; zeros if the loss does not depend on it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a fraction of the largest value in all of `theirs`."""
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / max(largest, 1e-30)


def _rows_of(result: Any) -> Tensor:
    """The model's result per row or sequence: the logits, or the last hidden states if there is no head."""
    if "start_logits" in result:
        return torch.stack([result["start_logits"], result["end_logits"]], -1)
    return cast(Tensor, result["logits" if "logits" in result else "last_hidden_state"])
