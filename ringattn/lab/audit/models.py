"""A model of Hugging Face over ranks beside itself in one process: logits, and the gradient of every parameter."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate, pairwise
from math import inf, nan
from typing import Any, cast

import torch
import torch.distributed as dist

from .kit import TIMES, Case, Verdict, check, check_tensor, choose, find_tolerance, place_rows

Tensor = torch.Tensor


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
    return {"input_ids": ids} if real.all() else {"input_ids": ids, "attention_mask": real.long()}


def find_spans(case: Case, row: int = 0) -> list[tuple[int, int]]:
    """(first, end) of each sequence within a row: its documents, or all tokens that are not padding."""
    ends = [*accumulate(case.mask.get("documents", ()))]
    return [*pairwise([0, *ends])] or [case.ends(row)]


def _cotangent(case: Case, like: Tensor) -> Tensor:
    """Random [B, N, classes], 0 on padding."""
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(3), device="cpu").to(like)
    return grad.masked_fill(~case.is_real(torch.arange(case.tokens, device="cpu"))[..., None].to(grad.device), 0.0)


class Tested:
    """A model with equal weights on all ranks, to run in one process and as parallelized by the audited function."""

    def __init__(self, make: Callable[[], Any]) -> None:
        torch.manual_seed(1)
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

    def forward(self, case: Case, dtype: torch.dtype) -> tuple[Any, Tensor]:
        """A copy of the model, and its logits by eager attention in one process, which runs each sequence alone."""
        model = deepcopy(self.base).to(getattr(torch, case.dtype)).to(dtype)
        ids, options = make_batch(case, self.words)["input_ids"], {}
        if hasattr(model, "set_attn_implementation"):
            options = {"use_cache": False}
            model.set_attn_implementation("eager")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the default takes no fp64
        rows = []
        for row, spans in enumerate(find_spans(case, i) for i in range(case.batch)):
            parts = [model(ids[row : row + 1, a:b], **options) for a, b in spans]
            logits = torch.cat([getattr(part, "logits", part) for part in parts], 1)
            rows.append(torch.nn.functional.pad(logits, (0, 0, spans[0][0], case.tokens - spans[-1][1])))
        return model, torch.cat(rows)

    def compute(self, case: Case, dtype: torch.dtype) -> list[Tensor]:
        """Logits and gradients of one process, as fp64."""
        model, logits = self.forward(case, dtype)
        loss = (logits * _cotangent(case, logits)).sum()
        grads = torch.autograd.grad(loss, [*_trained(model).values()], materialize_grads=True)
        return [x.detach().double() for x in (logits, *grads)]

    def prepare(self, target: Callable[..., Any], case: Case, device: torch.device) -> Callable[[], Verdict]:
        """Make the exact results of a case; returns a function that runs the parallelized model and compares."""
        exact, alone = self.compute(case, torch.float64), self.compute(case, getattr(torch, case.dtype))
        return lambda: self.compare(target, case, device, exact, alone)

    def compare(
        self, target: Callable[..., Any], case: Case, device: torch.device, exact: list[Tensor], alone: list[Tensor]
    ) -> Verdict:
        """Compare this rank's logits, and the gradients summed over ranks, with one process. Collective."""
        rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), getattr(torch, case.dtype)
        rows, model = place_rows(target, case.tokens, rank, ranks), deepcopy(self.base).to(dtype).to(device)
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
            grad: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if hasattr(grad, "full_tensor"):  # FSDP has taken the mean over the ranks
                found.append(grad.full_tensor() * ranks)
            else:
                dist.all_reduce(grad)
                found.append(grad)
        # All gradients share a tolerance, as small ones inherit the rounding of large ones.
        scale = max(float(x.abs().max()) for x in exact[1:])
        pairs = zip(alone[1:], exact[1:], strict=True)
        allowed = max(find_tolerance(x, right, dtype, scale, TIMES)[0] for x, right in pairs), inf
        padding, largest = ~case.is_real(torch.arange(case.tokens, device="cpu")), float(exact[0].abs().max())
        least = find_tolerance(alone[0], exact[0], dtype, largest, TIMES)
        near = exact[0].masked_fill(padding[..., None], nan)[:, None], least, largest
        verdicts = [check("logits", found[0][:, None], near, rows)]
        for name, mine, right in zip(_trained(model), found[1:], exact[1:], strict=True):
            verdicts.append(check(f"the gradient of {name}", mine, (right, allowed, scale)))
        return choose(verdicts)


def _trained(model: Any) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
