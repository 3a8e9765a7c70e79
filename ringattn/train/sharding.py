"""The ranks of a training run, a model that is sharded over them, and its checkpoints."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput
from ..transport.launcher import detect, init_process_group


def start(timeout: float = 1800.0) -> torch.device:
    """Join the ranks that torchrun started; returns the device of this one: its GPU where there is one, else the CPU.

    Without torchrun, this process is the only rank. `timeout` (seconds) bounds every wait for another rank. A process
    that has a group already keeps it. Raises InvalidInput under other launchers, CommFailure if ranks do not connect.
    """
    launch, card, backend = detect(), None, "gloo"
    if torch.cuda.is_available():
        card, backend = torch.device("cuda", launch.local_rank % torch.cuda.device_count()), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(card)
    if not dist.is_initialized():
        if launch.kind == "none":
            store = import_module("torch.distributed").HashStore()  # which has no type annotations
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            init_process_group(launch, backend=backend, timeout=timeout, device=card)
    return card or torch.device("cpu")


def shard(model: nn.Module) -> nn.Module:
    """Shard weights, gradients and optimizer states of a transformers model over all ranks, by FSDP2; returns `model`.

    Its layers are recomputed in the backward. On GPUs they compute in bf16, and gradients are summed in fp32. Call it
    after `parallelize`, and before making the optimizer.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [part for part in model.modules() if type(part).__name__ in names]
    if not layers:
        raise InvalidInput(f"{type(model).__name__} names no layers (_no_split_modules); call fully_shard on its parts")
    found: Any = model
    recompute = "activation_checkpointing_enable"  # transformers 5.24 warns of the older name
    getattr(found, recompute, found.gradient_checkpointing_enable)({"use_reentrant": False})
    found.config.use_cache = False  # which recomputing excludes
    dtypes = (torch.bfloat16, torch.float32) if torch.cuda.is_available() else ()
    for part in (*layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(*dtypes))
    return model


class Checkpoints:
    """The checkpoints of a run, `folder/step_000010`: weights, optimizer, and `others`.

    others: whatever has `state_dict` and `load_state_dict`, such as `Log` and `pack`, by name.

    They load on any number of ranks. Calls are collective. Load only files that you trust: their metadata is a pickle,
    which can run any code.
    """

    def __init__(self, folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> None:
        self.folder, self.model, self.optimizer, self.others = Path(folder), model, optimizer, others

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, **self.others}

    def load(self) -> bool:
        """Load the last checkpoint that is whole, and say which; returns whether there is one."""
        from torch.distributed.checkpoint.state_dict import set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        saved = sorted(self.folder.glob("step_*/.metadata"))
        if saved:
            state = self._state()
            load(state, checkpoint_id=saved[-1].parent)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            if dist.get_rank() == 0:
                sys.stdout.write(f"continues from {saved[-1].parent}\n")
        return bool(saved)

    def save(self, step: int) -> None:
        """Save everything as that of a step."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), checkpoint_id=self.folder / f"step_{step:06}")
