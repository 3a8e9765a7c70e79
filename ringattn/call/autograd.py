"""Attention as one node of torch's graph, for one rank of a transport or for all ranks in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from inspect import signature
from itertools import islice
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from .. import cache
from ..kernels.chosen import move_rows
from ..kernels.contract import Chosen, VisitKernel
from ..kernels.memory import as_dtype, differentiable, empty_rows
from ..kernels.pad import HIDDEN
from ..kernels.softmax import sinks_gradient
from ..plan.plan import Plan
from ..runtime.passes import backward, count_saved, forward
from ..runtime.ring import ForwardResult, Job
from ..transport.base import Tags, Transport, drive
from ..transport.records import ErrorReport
from ..transport.virtual import VirtualRanks
from .arguments import computing
from .compile import CompiledCall
from .handshake import agree_backward
from .last import make_last

Tensors = tuple[Tensor, ...]
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Runner:
    """Runs the forward and the backward of one attention call.

    With a `transport`, this process computes one rank, and tensors are the shards of that rank. With `transport` None,
    this process computes all ranks, and tensors hold the whole sequence. `number` identifies the call and is equal on
    all ranks. With `deferred`, ranks compare the arguments of the call while its messages travel, not before.
    """

    call: CompiledCall
    plan: Plan
    kernel: VisitKernel
    sinks: Tensor | None = None
    transport: Transport | None = None
    number: int = 0
    deferred: bool = False
    #: The keys that the queries have chosen, [B, groups, n, k].
    chosen: Tensor | None = None

    @cached_property
    def count(self) -> int:
        """The number of tensors of a block: 2 for (k, v)."""
        return len(self.plan.tensors("kv"))

    def run(self, q: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse) for a call with `return_lse`.

        `tensors` are here and below those of a block, such as k and v, and then the weights that expand it.
        """
        layout, scale, count = self.plan.layout, self.plan.output_scale, self.count
        if self.plan.stacked:
            q, tensors = layout.stack(q), (*map(layout.stack, tensors[:count]), *tensors[count:])
        out, lse = Attention.apply(self, self.sinks, q, *tensors)
        if self.plan.stacked:
            out, lse = layout.unstack(out), layout.unstack(lse)
        if scale != 1.0:
            # The graph may still need the unscaled output.
            out = out * scale if out.requires_grad else out.mul_(scale)
        return (out, lse) if self.call.return_lse else out

    def job(self, rank: int, tensors: Tensors = ()) -> Job:
        """The `Job` of a rank: its plan, kernel and options, as the executor needs them."""
        weights = tensors[self.count :]
        kernel = self.kernel.derive(weights=weights) if weights else self.kernel
        chosen = None if self.chosen is None else self._chosen[rank if self.transport is None else 0]
        return Job(self.plan, rank, kernel, self.call.factor, self.call.return_lse, sinks=self.sinks, chosen=chosen)

    @cached_property
    def _chosen(self) -> list[Chosen]:
        """The chosen keys of each rank that this process computes, for each query head."""
        assert self.chosen is not None and self.call.chosen is not None
        layout, keys, group = self.plan.layout_of("q"), self.chosen, self.plan.heads // self.chosen.shape[1]
        whole = Chosen(keys, group, self.call.chosen[-1])
        if self.plan.stacked:
            whole = replace(whole, stride=self.plan.stride)
            keys = layout.stack(move_rows(keys, whole.blocks))
        shards = [keys] if self.transport is not None else layout.shard_all(keys)
        return [replace(whole, keys=x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)) for x in shards]

    def forward(self, q: Tensor, tensors: Tensors, save: bool) -> ForwardResult:
        """out and lse; with `save` also the tensors that the backward starts from."""
        if self.transport is None:
            return self._forward_all(q, tensors, save)
        rank, tags = self.transport.rank, Tags.of_call(self.number, backward=False)
        with ErrorReport(self.transport, "call", deferred=True):
            program = forward(self.job(rank, tensors), q, tensors[: self.count], save=save, tags=tags)
            return drive(program, self.transport, rank)

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, tensors: Tensors, result: ForwardResult
    ) -> Tensors:
        """(dq, dk, dv), or those of `ring.backward`, from d loss / d out and d loss / d lse (or None).

        First the ranks check that all of them run the backward of the same call.
        """
        if self.transport is None:
            return self._backward_all(grad, grad_lse, q, tensors, result)
        agree_backward(self.transport, self.number, deferred=self.deferred)
        rank, tags = self.transport.rank, Tags.of_call(self.number, backward=True)
        with ErrorReport(self.transport, "call", deferred=True):
            program = backward(self.job(rank, tensors), grad, grad_lse, q, tensors[: self.count], result, tags=tags)
            return drive(program, self.transport, rank)

    def _forward_all(self, q: Tensor, tensors: Tensors, save: bool) -> ForwardResult:
        layout, ranks, whole_out = self.plan.layout_of("q"), self.plan.ranks, None
        if ranks > 1 and layout.single:
            # Where a shard is one range, its rank writes to a view of the whole output.
            whole_out = empty_rows((*q.shape[:3], self.plan.value_dim), q.dtype, q.device)
        outs: Sequence[Tensor | None] = [None] * ranks if whole_out is None else layout.shard_all(whole_out)
        each = enumerate(zip(self._shard(q, *tensors[: self.count]), outs, strict=True))
        programs = [forward(self.job(i, tensors), q, tuple(own), save=save, out=out) for i, ((q, *own), out) in each]
        results = VirtualRanks(ranks).run(programs)
        saved = tuple([x for result in results for x in result.saved])
        if ranks == 1 and layout.single:
            return ForwardResult(results[0].out, results[0].lse, saved)
        if whole_out is None:
            whole_out = layout.unshard_tensor([result.out for result in results])
        return ForwardResult(whole_out, layout.unshard_tensor([result.lse for result in results], -1), saved)

    def _backward_all(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, tensors: Tensors, result: ForwardResult
    ) -> Tensors:
        q_layout, layout, saved = self.plan.layout_of("q"), self.plan.layout, iter(result.saved)
        given = zip(
            self._shard(q, *tensors[: self.count]),
            *(q_layout.shard_all(x) for x in (grad, result.out)),
            q_layout.shard_all(result.lse, -1),
            [None] * self.plan.ranks if grad_lse is None else q_layout.shard_all(grad_lse, -1),
            strict=True,
        )
        programs = []
        for rank, ((q, *own), dout, out, lse, dlse) in enumerate(given):
            found = ForwardResult(out, lse, tuple(islice(saved, count_saved(self.plan, rank))))
            programs.append(backward(self.job(rank, tensors), dout, dlse, q, tuple(own), found))
        of_q, *of_others = zip(*VirtualRanks(self.plan.ranks).run(programs), strict=True)
        count = len(differentiable(tensors[: self.count]))
        of_weights = (torch.stack(parts).sum(0) for parts in of_others[count:])
        return q_layout.unshard_tensor(of_q), *map(layout.unshard_tensor, of_others[:count]), *of_weights

    def _shard(self, q: Tensor, *block: Tensor) -> Iterable[Tensors]:
        """The shards of each rank."""
        q_layout, layout = self.plan.layout_of("q"), self.plan.layout
        return zip(q_layout.shard_all(q), *map(layout.shard_all, block), strict=True)


class Attention(torch.autograd.Function):
    """The autograd function of attention: the computation of all ranks is one node of the autograd graph.

    Saves the inputs, out, lse, and the keys and values of the forward's last step, with which the backward begins.
    """

    @staticmethod
    def forward(ctx: Any, runner: Runner, sinks: Tensor | None, q: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        floor, count = runner.call.floor, runner.count
        with computing(q.device):
            save = any(ctx.needs_input_grad[2:])
            result = runner.forward(q, (*tensors[:count], *(x.detach() for x in tensors[count:])), save=save)
        if floor is not None:  # treat a row that sees only padded keys as one that sees no key
            empty = result.lse < floor
            result.out.masked_fill_(empty.unsqueeze(-1), 0.0)
            result.lse.masked_fill_(empty, -torch.inf)
        ctx.runner, ctx.empty = runner, floor is not None or runner.chosen is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, result.out, result.lse, q, *tensors, *result.saved)
        # Not views of larger tensors, which must not be modified in place.
        return result.out.detach(), result.lse.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: a checkpoint gives them only once
        with torch.no_grad():
            found = Attention._differentiate(ctx, tensors, *grads)
        return None, *make_last(found, *tensors[: len(found) + 2], *grads)

    @staticmethod
    def _differentiate(ctx: Any, tensors: Tensors, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        (sinks, out, lse, q), (_, needs_sinks, *needs), count = tensors[:4], ctx.needs_input_grad, ctx.runner.count
        block, given, saved = tensors[4 : 4 + count], tensors[4 + count : 3 + len(needs)], tensors[3 + len(needs) :]
        grad = torch.zeros_like(out) if grad is None else grad
        if ctx.empty:
            # The kernels compute these rows, too. A huge lse makes their weights exp(-huge) = 0.
            empty = lse == -torch.inf
            lse, grad = lse.masked_fill(empty, HIDDEN), grad.masked_fill(empty.unsqueeze(-1), 0.0)
            grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
        weights = tuple([x.detach().requires_grad_(need) for x, need in zip(given, needs[1 + count :], strict=True)])
        result, grads = ForwardResult(out, lse, tuple(saved)), cast(list[Tensor | None], [None] * len(needs))
        with computing(q.device):
            # Ranks agree whether q, k or v needs a gradient, but not whether the sinks do.
            if any(needs):
                found = iter(ctx.runner.backward(grad, grad_lse, q, (*block, *weights), result))
                has_one = [True, *map(bool, map(differentiable, zip(block))), *needs[1 + count :]]
                inputs = zip(has_one, (q, *block, *given), strict=True)
                grads = [as_dtype(next(found), x.dtype) if has else None for has, x in inputs]
            return sinks_gradient(sinks, grad, grad_lse, out, lse) if needs_sinks else None, *grads


#: The modes of selective checkpointing, in the forward and in the recomputation.
SELECTING = _CachingTorchDispatchMode, _CachedTorchDispatchMode
cache.is_tracing = torch.compiler.is_compiling


def compilable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: torch.compile and selective checkpointing treat `function` as one operator; see `graph_op`."""
    name = f"{function.__module__}:{function.__qualname__}"
    names = tuple(signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling() and not is_selecting():
            return function(*args, **kwargs)
        from .graph_op import call_in_graph  # registers operators, which few programs need

        return cast(R, call_in_graph(name, {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}))

    if torch.__version__ < "2.12":  # older ones take no modules, layouts or groups as arguments of constant functions
        return torch.compiler.disable(call, reason="torch.compile takes attention from torch 2.12 on")
    return call


def is_selecting() -> bool:
    """Whether a selective checkpoint is active, which decides for each operator whether to keep its result."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, SELECTING) for mode in _get_current_dispatch_mode_stack())
