"""A model of Hugging Face over ranks beside itself in one process: logits, and the gradient of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...text import did_you_mean, first_line
from .cases import Case, find_named
from .judge import ERRORS, Verdict, check, check_tensor, choose, find_tolerance, place_rows

Tensor = torch.Tensor
#: Sizes of a class that is given by its name.
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def load_model(name: str) -> tuple[Callable[[], Any], str, str]:
    """Find a model by name; returns (function that makes it, import statement, expression).

    The import and the expression make the model in a script. `name` is module:function, a class of transformers (made
    with tiny sizes), or a folder with config.json. Raises InvalidInput.
    """
    module, named, function = name.partition(":")
    find: Any = partial(find_named, f"model={name}", module if named else "transformers")
    imported = f"from {module} import {function} as make" if named else "import transformers as hf"
    if not named and Path(name).exists():
        model, config = find("AutoModelForCausalLM"), find("AutoConfig")
        spelled = f"hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained({name!r}))"
        return lambda: model.from_config(config.from_pretrained(name)), imported, spelled
    kind = find(function if named else name)
    if not callable(kind) or not (named or hasattr(kind, "config_class")):
        hint = did_you_mean(function or name, dir(import_module(module if named else "transformers")))
        words = "expected module:function, a class of models in transformers, or a folder with config.json"
        raise InvalidInput(f"model={name}: {hint}{words}")
    if named:
        return kind, imported, "make()"
    return lambda: kind(kind.config_class(**SIZES)), imported, f"hf.{name}(hf.{name}.config_class(**{SIZES}))"


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


def make_batch(case: Case, words: int, seed: int = 2) -> dict[str, Tensor]:
    """A batch of whole sequences: input_ids [B, N], and for documents or padding another tensor.

    For packed documents position_ids that restart in each, for padding an attention_mask that is 0 there.
    """
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, words, (case.batch, case.tokens), generator=source, device="cpu")
    if "documents" in case.mask:
        places = torch.cat([torch.arange(b - a, device="cpu") for a, b in find_spans(case)])
        return {"input_ids": ids, "position_ids": places.expand_as(ids)}
    real = case.is_real(torch.arange(case.tokens, device="cpu"))
    return {"input_ids": ids} if real.all() else {"input_ids": ids, "attention_mask": real.long().expand_as(ids)}


def find_spans(case: Case) -> list[tuple[int, int]]:
    """(first, end) of each sequence within a row: its documents, or all tokens that are not padding."""
    ends = [*accumulate(case.mask.get("documents", ()))]
    return [*pairwise([0, *ends])] or [case.real]


def _cotangent(case: Case, like: Tensor) -> Tensor:
    """Random [B, N, classes], 0 on padding."""
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(3), device="cpu").to(like)
    grad[:, : case.real[0]] = grad[:, case.real[1] :] = 0
    return grad


def check_model(name: str, case: Case) -> None:
    """Raise InvalidInput for a model that one process cannot make, or run on such a case."""
    try:
        Tested(name).compute(case, torch.float32)
    except InvalidInput:
        raise
    except ERRORS as error:
        words = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidInput(f"model={name}: one process cannot run it: {words}") from None


class Tested:
    """A model with equal weights on all ranks, to run in one process and as parallelized by the audited function."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        make, *self.source = load_model(name)
        self.base = make().eval()
        for module in self.base.modules():  # nothing may drop in training mode
            for key, value in vars(module).items():
                if isinstance(value, float) and ("drop" in key or isinstance(module, torch.nn.Dropout)):
                    setattr(module, key, 0.0)
        table = getattr(self.base, "get_input_embeddings", lambda: None)()
        self.words = min(61, getattr(table, "num_embeddings", 61))
        for x in (*self.base.parameters(), *self.base.buffers()) if dist.is_initialized() else ():
            held = x.detach().cuda() if dist.get_backend() == "nccl" else x.detach()
            dist.broadcast(held, 0)
            x.data.copy_(held)

    def compute(self, case: Case, dtype: torch.dtype) -> list[Tensor]:
        """Logits and gradients, as fp64, of eager attention in one process, which runs each sequence alone."""
        model = deepcopy(self.base).to(getattr(torch, case.dtype)).to(dtype)
        ids, options = make_batch(case, self.words)["input_ids"], {}
        if hasattr(model, "set_attn_implementation"):
            options = {"use_cache": False}
            model.set_attn_implementation("eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the default takes no fp64
        parts = [model(ids[:, a:b], **options) for a, b in find_spans(case)]
        logits = torch.cat([getattr(part, "logits", part) for part in parts], 1)
        logits = torch.nn.functional.pad(logits, (0, 0, case.mask.get("left", 0), case.mask.get("padding", 0)))
        loss = (logits * _cotangent(case, logits)).sum()
        grads = torch.autograd.grad(loss, [*_trained(model).values()], materialize_grads=True)
        return [x.detach().double() for x in (logits, *grads)]

    def solve(self, case: Case) -> tuple[list[Tensor], list[Tensor]]:
        """The results of `compute` in fp64, and its results in the dtype of the case."""
        return self.compute(case, torch.float64), self.compute(case, getattr(torch, case.dtype))

    def compare(
        self, target: Callable[..., Any], case: Case, device: torch.device, solved: tuple[list[Tensor], list[Tensor]]
    ) -> Verdict:
        """Compare this rank's logits, and the gradients summed over ranks, with one process. Collective."""
        rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, case.dtype)
        rows, model = place_rows(target, case.tokens, rank, ranks), deepcopy(self.base).to(dtype).to(device)
        exact, alone = solved
        if "checkpoint" in case.ways:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})

        def run(seed: int) -> Tensor:
            batch = {name: x.to(device) for name, x in make_batch(case, self.words, seed).items()}
            result = target(model, batch, group=dist.group.WORLD)
            logits = getattr(result, "logits", result)
            check_tensor("logits", logits, (case.batch, len(rows), exact[0].shape[2]))
            return cast("Tensor", logits)

        if "again" in case.ways:  # buffers and caches of this call must not reach the next
            run(4).sum().backward()
            model.zero_grad()
        local = run(5 if "differ" in case.ways and rank == 1 else 2)
        if "differ" in case.ways:
            return Verdict("wrong", "no rank raised an error, although rank 1 has other tokens", "logits")
        (local * _cotangent(case, exact[0])[:, rows].to(local)).sum().backward()
        found = [local.detach()]
        for parameter in _trained(model).values():
            found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            dist.all_reduce(found[-1])
        scale = max(float(x.abs().max()) for x in exact[1:])
        allowed = max(find_tolerance(x, right, scale, dtype) for x, right in zip(alone[1:], exact[1:], strict=True))
        real = case.is_real(rows)
        rows, shown, largest = rows[real], found[0][:, None, real.to(device)], float(exact[0].abs().max())
        right = exact[0][:, None, rows]
        verdicts = [check("logits", shown, right, find_tolerance(alone[0], exact[0], largest, dtype), rows, largest)]
        # All gradients share a tolerance, as small ones inherit the rounding of large ones.
        for name, mine, right in zip(_trained(model), found[1:], exact[1:], strict=True):
            verdicts.append(check(f"the gradient of {name}", mine, right, allowed, None, scale))
        return choose(verdicts)


def _trained(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
