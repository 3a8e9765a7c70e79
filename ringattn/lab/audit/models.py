"""A model of Hugging Face over ranks beside itself in one process: logits, and the gradient of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from .cases import Case, find_named
from .judge import Verdict, check, choose, find_tolerance, place_rows

Tensor = torch.Tensor
#: Sizes of a class that is given by its name.
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def load_model(name: str) -> Callable[[], Any]:
    """A function that makes the model: module:function, a class of transformers, tiny, or a folder with config.json."""
    module, named, function = name.partition(":")
    find: Any = partial(find_named, f"model={name}", module if named else "transformers")
    if not named and Path(name).exists():
        model, config = find("AutoModelForCausalLM"), find("AutoConfig")
        return lambda: model.from_config(config.from_pretrained(name))
    kind = find(function if named else name)
    if not callable(kind):
        words = "expected module:function, a class of transformers, or a folder with config.json"
        raise InvalidInput(f"model={name}: {words}")
    return kind if named else lambda: kind(kind.config_class(**SIZES))


def spell(name: str) -> tuple[str, str]:
    """(an import, an expression) for a script that makes the model."""
    module, named, function = name.partition(":")
    if named:
        return f"from {module} import {function} as make", "make()"
    made = f"hf.{name}(hf.{name}.config_class(**{SIZES}))"
    if Path(name).exists():
        made = f"hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained({name!r}))"
    return "import transformers as hf", made


def list_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature, for batches of 12 tokens a rank."""
    tokens = 12 * ranks
    base = Case("whole sequences", tokens, 2, 1, 1, 2)
    yield base
    yield replace(base, feature="documents", mask={"documents": (5, tokens // 2, tokens - tokens // 2 - 5)})
    yield replace(base, feature="padding on the right", mask={"padding": 5})
    yield replace(base, feature="padding on the left", mask={"left": 5})
    yield replace(base, feature="uneven length", tokens=tokens - 1)
    yield replace(base, feature="bfloat16", dtype="bfloat16")
    for way, name in (("checkpoint", "checkpointing"), ("again", "a second call"), ("differ", "ranks that differ")):
        yield replace(base, feature=name, ways=(way,))


def make_batch(case: Case, seed: int = 2) -> dict[str, Tensor]:
    """Whole sequences: input_ids [B, N], position_ids that restart, or an attention_mask with zeros for padding."""
    ids = torch.randint(1, 61, (case.batch, case.tokens), generator=torch.Generator().manual_seed(seed), device="cpu")
    spans = find_spans(case)
    if "documents" in case.mask:
        return {
            "input_ids": ids,
            "position_ids": torch.cat([torch.arange(b - a, device="cpu") for a, b in spans]).expand_as(ids),
        }
    real = _is_token(case)
    return {"input_ids": ids} if real.all() else {"input_ids": ids, "attention_mask": real.long().expand_as(ids)}


def find_spans(case: Case) -> list[tuple[int, int]]:
    """(first token, end) of the sequences of a row."""
    mask, start = case.mask, 0
    if "documents" in mask:
        return [(start, start := start + length) for length in mask["documents"]]
    return [(mask.get("left", 0), case.tokens - mask.get("padding", 0))]


def _make(make: Callable[[], Any], *dtypes: torch.dtype) -> Any:
    """The model without dropout, the same on every rank, its weights rounded to one dtype after the other."""
    torch.manual_seed(1)
    model = make().eval()
    for dtype in dtypes:
        model = model.to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def _cotangent(case: Case, like: Tensor) -> Tensor:
    """Random [B, N, classes], 0 on padding."""
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(3), device="cpu").to(like)
    return grad * _is_token(case)[:, None].to(like)


def _is_token(case: Case) -> Tensor:
    """bool [N]: which places are no padding."""
    place, spans = torch.arange(case.tokens, device="cpu"), find_spans(case)
    return (place >= spans[0][0]) & (place < spans[-1][1])


def _solve(make: Callable[[], Any], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Logits and gradients of one process by eager attention, each sequence by itself, as fp64."""
    model, ids = _make(make, getattr(torch, case.dtype), dtype), make_batch(case)["input_ids"]
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default takes no fp64
    logits = torch.cat([model(ids[:, a:b], use_cache=False).logits for a, b in find_spans(case)], 1)
    logits = torch.nn.functional.pad(logits, (0, 0, case.mask.get("left", 0), case.mask.get("padding", 0)))
    loss = (logits * _cotangent(case, logits)).sum()
    grads = torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True)
    return [x.detach().double() for x in (logits, *grads)]


def compare(make: Callable[[], Any], target: Callable[..., Any], case: Case, device: torch.device) -> Verdict:
    """The verdict on this rank's logits, and on the sums over the ranks of the gradients. Collective."""
    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, case.dtype)
    rows, model = place_rows(target, case.tokens, rank, ranks), _make(make, dtype).to(device)
    if "checkpoint" in case.ways:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})

    def run(seed: int) -> Tensor:
        batch = {name: x.to(device) for name, x in make_batch(case, seed).items()}
        result = target(model, batch, group=dist.group.WORLD)
        return getattr(result, "logits", result)

    if "again" in case.ways:  # buffers and caches of this call must not reach the next
        run(4).sum().backward()
        model.zero_grad()
    local = run(5 if "differ" in case.ways and rank == 1 else 2)
    if "differ" in case.ways:
        return Verdict("wrong", "nobody noticed that rank 1 has other tokens", "logits", 1.0)
    exact, alone = _solve(make, case, torch.float64), _solve(make, case, dtype)
    (local * _cotangent(case, exact[0])[:, rows].to(local)).sum().backward()
    found = [local.detach()]
    for parameter in model.parameters():
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        dist.all_reduce(found[-1])
    scale = max(float(x.abs().max()) for x in exact[1:])
    allowed = max(find_tolerance(x, right, scale, dtype) for x, right in zip(alone[1:], exact[1:], strict=True))
    real = _is_token(case)[rows]
    rows, shown, largest = rows[real], found[0][:, None, real.to(device)], float(exact[0].abs().max())
    right = exact[0][:, None, rows]
    verdicts = [check("logits", shown, right, find_tolerance(alone[0], exact[0], largest, dtype), rows, largest)]
    # All gradients share a tolerance, as small ones inherit the rounding of large ones.
    for (name, _), mine, right in zip(model.named_parameters(), found[1:], exact[1:], strict=True):
        verdicts.append(check(f"the gradient of {name}", mine, right, allowed, None, scale))
    return choose(verdicts)
