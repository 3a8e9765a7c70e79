"""The loss of a language model in chunks of rows, by its own head, which never makes the logits of all rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, Unsupported
from ..train.loss import NO_LABEL, SumInChunks
from .generation import STATE
from .routers import has_routers

#: The most logits of a chunk, which take 512 MiB in fp32.
LOGITS = 1 << 27


def is_chunked(model: Any, loss: str, shift: bool | None) -> bool:
    """Whether `loss` is "chunked". Raises InvalidInput for other words, Unsupported for models without such a loss."""
    if loss not in ("whole", "chunked"):
        raise InvalidInput(f"loss={loss!r}: expected 'whole', or 'chunked' for a loss without the logits of all rows")
    keeps = shift is not None and "logits_to_keep" in inspect.signature(model.forward).parameters
    if loss == "chunked" and not (keeps and model._modules.get(model.base_model_prefix) is model.base_model):
        raise Unsupported(f"loss='chunked': {type(model).__name__} has no head that takes logits_to_keep; leave it out")
    return loss == "chunked"


def keep_rows(base: nn.Module, args: Any, result: Any) -> None:
    """Hook: keep the result of the model below a head for `ChunkedCall.finish`."""
    ring = getattr(base, STATE)
    if ring is not None and ring.call.chunks is not None:
        ring.call.chunks.below = result


class ChunkedCall:
    """One call whose loss is computed in chunks; takes the labels out of its arguments `kept`."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.labels = {name: kept.pop(name) for name in ("labels", "shift_labels") if name in kept}
        kept["logits_to_keep"] = 1
        #: The result of the model below the head, and the rows that a call of the head sees of it.
        self.below: Any = None
        self.rows: Any = None

    def finish(self, model: Any, result: Any) -> Any:
        """The model's result without logits, with the mean loss over the labels of this rank's rows."""
        name, base = model.base_model_prefix, model.base_model
        named = model.named_parameters(remove_duplicate=False)  # a tied weight is the head's, too
        weights = list(dict.fromkeys(p for x, p in named if not x.startswith(f"{name}.")))
        if self.below is None or any(hasattr(p, "placements") for p in weights):
            reason = f"calls only a part of its {name!r}" if self.below is None else "has a head that is sharded apart"
            raise Unsupported(f"loss='chunked': {type(model).__name__} {reason}; leave loss out, or shard the whole")
        options = {"return_dict": True, **dict.fromkeys(["output_router_logits"] * has_routers(model), False)}

        def stub(*args: Any, **kwargs: Any) -> Any:
            return type(self.below)(**{**self.below, "last_hidden_state": self.rows})

        def part(rows: Tensor, labels: Tensor) -> Tensor:
            self.rows = rows[None]
            loss = model.forward(**dict.fromkeys(self.labels, labels[None]), **options)["loss"]
            count = (labels != NO_LABEL).sum()
            return torch.where(count > 0, loss * count, 0.0)

        vars(stub).update(vars(base))  # which a head may read, such as a scale of logits
        rows, labels = self.below["last_hidden_state"].flatten(0, 1), self.labels["labels"].flatten()
        chunk = max(LOGITS // model.config.get_text_config().vocab_size, 1)
        model._modules[name] = stub
        try:
            total = SumInChunks.apply(part, chunk, torch.is_grad_enabled(), rows, labels, *weights)
        finally:
            model._modules[name] = base
        return type(result)(**{**result, "loss": total / (labels != NO_LABEL).sum().clamp(min=1), "logits": None})
