"""Trainers of transformers and TRL, and accelerate loops, on ranks that share sequences.

    trainer = RingTrainer(model, args, train_dataset=data, cp=4)  # on 8 ranks: dp 2 x cp 4

    class RingSFTTrainer(RingMixin, SFTTrainer):
        pass

A trainer sees each cp group as one process: its ranks read the same batches, and the model takes whole sequences.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import operations, recursively_apply
from msgspec import msgpack
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset
from transformers import Trainer

from ..call.functional import get_transport
from ..errors import InvalidInput, Unsupported
from ..transport.records import Exchange, exchange_values
from . import check_release
from .generation import STATE
from .transformers import parallelize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader

    from ..layout.regular import Layout
    from .batches import LayerMasks


class Broadcast(IterableDataset[Any]):
    """A stream of examples for all ranks, of which only rank 0 reads the data.

    Iterating is collective, so the DataLoader must have num_workers=0. Examples are numbers, text, tensors, and lists
    and dicts of these; tuples arrive as lists, and arrays as tensors.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream if it takes one."""
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.stream) if dist.get_rank() == 0 else iter(())
        while True:
            with Exchange(get_transport(), "example of a stream") as exchange:
                pack = lambda x: msgpack.Ext(0, save({"x": torch.as_tensor(x, device="cpu").contiguous()}))  # noqa: E731
                exchange.mine = msgpack.encode([*islice(source, 1)], enc_hook=pack)
            found = msgpack.decode(exchange.records[0], ext_hook=lambda _, data: load(bytes(data))["x"])
            if not found:
                return
            yield found[0]


class RingAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose processes are groups of ranks that share sequences (cp groups), not single ranks.

    The ranks of a group get the same batches. `cp` is the number of consecutive ranks in a group; None: all. `mesh` has
    the axes dp and cp, or is None in a single process. Pass the group to `parallelize(model, mesh["cp"], layout=...,
    whole=True)`.

    `num_processes`, `process_index`, `gather` and `gather_for_metrics` of tensors, and `reduce` count each group once.
    With dispatch_batches=True only rank 0 reads a stream, otherwise each rank does. A scheduler prepared by Accelerate
    would step once per rank: pass step_scheduler_with_optimizer=False, and step it yourself.
    """

    mesh: DeviceMesh | None

    def __init__(self, *args: Any, cp: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.form_groups(cp)

    def form_groups(self, cp: int | None) -> None:
        """Set `mesh`. Raises InvalidInput for a `cp` that does not divide the ranks. Collective."""
        ranks = self.state.num_processes
        cp = ranks if cp is None else cp
        if cp < 1 or ranks % cp:
            raise InvalidInput(f"cp={cp} does not divide the {ranks} ranks; start a multiple of {cp}, or change cp")
        config = self.parallelism_config
        if config is not None and config.non_data_parallel_size > 1:
            raise Unsupported(f"cp={cp} beside accelerate's own tp_size, cp_size or sp_size; give only cp={cp}")
        shape, axes = (ranks // cp, cp), ("dp", "cp")
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=axes) if ranks > 1 else None

    @property
    def num_processes(self) -> int:
        """The number of cp groups, that is, groups of ranks that share sequences."""
        return 1 if self.mesh is None else self.mesh.size(0)

    @property
    def process_index(self) -> int:
        """The index of this rank's cp group, the group of ranks with which it shares sequences."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("dp")

    def drop_copies(self, x: Tensor) -> Tensor:
        """Keep the rows of the first rank of each group, from x [ranks * B, ...], which has rows of all ranks."""
        if self.mesh is None:
            return x
        each = x.unflatten(0, (self.num_processes, -1, len(x) // self.state.num_processes))
        return each[:, 0].flatten(0, 1)

    def gather(self, tensor: Any) -> Any:
        """`Accelerator.gather`, but with each group's rows once: those of its first rank."""
        return recursively_apply(self.drop_copies, super().gather(tensor))

    def gather_object(self, items: list[Any]) -> list[Any]:
        """accelerate's `gather_object`, without pickles, and with each group's list once: that of its first rank.

        Items are strings, numbers, lists and dicts of these.
        """
        lists = exchange_values(get_transport() if dist.is_initialized() else None, "objects", items, list)
        return [x for of_group in lists[:: self.state.num_processes // self.num_processes] for x in of_group]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """`Accelerator.reduce`, but with each group's tensor once: that of its first rank."""

        def join(x: Tensor) -> Tensor:
            each = self.gather(x[None])
            return (each.sum(0) if reduction == "sum" else each.mean(0, dtype=torch.float32)) * scale

        return super().reduce(tensor, reduction, scale) if self.mesh is None else recursively_apply(join, tensor)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """`Accelerator.prepare_data_loader`, where each cp group gets its own share of the data."""
        config = self.dataloader_config
        dispatch, config.dispatch_batches = config.dispatch_batches, False  # its dispatcher splits by rank
        if dispatch and isinstance(data_loader.dataset, IterableDataset) and self.mesh is not None:
            vars(data_loader)["dataset"] = Broadcast(data_loader.dataset)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        config.dispatch_batches = dispatch
        return cast("DataLoader[Any]", prepared)


class RingMixin:
    """Makes a trainer run on ranks that share sequences: class RingSFTTrainer(RingMixin, SFTTrainer).

    cp: how many ranks share a sequence; None: all. Each cp group gets its share of the data (dp).
    layout: how a sequence is cut, as in `parallelize`. The default cuts packed batches so that ranks have equal work,
        if that is predicted to be faster on `ring["machine"]`, and other batches by zigzag.
    ring: other options of `parallelize`, such as {"schedule": "ulysses"}.

    The trainer parallelizes its model and its reference model itself. Set its arguments as if each cp group were one
    process: per_device_train_batch_size is the batch of a cp group. In a single process the trainer is unchanged.
    Raises InvalidInput for a `cp` that does not divide the ranks, and Unsupported for strategies that split data by
    rank.
    """

    accelerator: RingAccelerator

    def __init__(
        self,
        *args: Any,
        cp: int | None = None,
        layout: str | Layout | LayerMasks = "auto",
        ring: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_release("accelerate", *{"trl", "peft"} & sys.modules.keys())
        self._cp = cp
        super().__init__(*args, **kwargs)
        mesh, given = self.accelerator.mesh, cast(Any, self).args
        if hasattr(given, "steps_per_generation"):  # GRPO's config has counted each rank as a process
            rows = given.per_device_train_batch_size * self.accelerator.num_processes * given.steps_per_generation
            if rows % given.num_generations:
                raise InvalidInput(
                    f"num_generations={given.num_generations} does not divide the {rows} completions of the cp groups; "
                    "set a larger per_device_train_batch_size or steps_per_generation"
                )
            given.generation_batch_size = rows
        if mesh is None:
            return
        for model in (cast(Any, self).model, getattr(self, "ref_model", None)):
            if model is not None:
                bare = self.accelerator.unwrap_model(model)
                parallelize(bare, mesh["cp"], layout=layout, whole=True, **(ring or {}))
        for kind in dict.fromkeys(("cpu", self.accelerator.device.type)):  # TRL seeds every rank differently
            numbers: Any = torch if kind == "cpu" else getattr(torch, kind)
            states = exchange_values(get_transport(), "numbers", numbers.get_rng_state().numpy().tobytes(), bytearray)
            numbers.set_rng_state(torch.frombuffer(states[self.accelerator.process_index], dtype=torch.uint8))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the trainer's accelerator, as transformers does, but as a `RingAccelerator`."""
        given = cast(Any, self).args
        for name, hint in (
            ("torch_compile", "compile the layers of the model yourself"),
            ("neftune_noise_alpha", "leave it out, its noise grows with fewer rows"),
        ):
            if dist.is_initialized() and dist.get_world_size() > 1 and getattr(given, name, None):
                raise Unsupported(
                    f"{name}={getattr(given, name)} is not supported on ranks that share sequences; {hint}"
                )
        cast(Any, super()).create_accelerator_and_postprocess()
        self.accelerator.__class__ = RingAccelerator
        self.accelerator.form_groups(self._cp)
        if given.train_sampling_strategy == "batch_rebalance":
            raise Unsupported("train_sampling_strategy='batch_rebalance' splits data by rank; choose another")

    def get_total_train_batch_size(self, args: Any) -> int:
        """The number of examples per step, over all cp groups."""
        return args.gradient_accumulation_steps * cast(Any, self)._train_batch_size * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """The trainer's prediction step; the model returns the logits of all rows only if metrics need them."""
        ring = getattr(cast(Any, self).model, STATE, None)
        if ring is not None:
            ring.call.logits = not prediction_loss_only
        with self._count_groups():
            return cast(Any, super()).prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The trainer's training step."""
        with self._count_groups():
            return cast(Any, super()).training_step(*args, **kwargs)

    @contextmanager
    def _count_groups(self) -> Iterator[None]:
        """A context where accelerate's functions, as the trainer's modules import them, count each group once."""
        with ExitStack() as stack:
            for module in {sys.modules.get(kind.__module__) for kind in type(self).__mro__}:
                for name in ("gather", "gather_object", "reduce"):
                    if (function := getattr(module, name, None)) is getattr(operations, name):
                        stack.callback(setattr, module, name, function)
                        setattr(module, name, getattr(self.accelerator, name))
            yield


class RingTrainer(RingMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers, with sequences over `cp` ranks; see `RingMixin`."""


__all__ = ["RingAccelerator", "RingMixin", "RingTrainer"]
