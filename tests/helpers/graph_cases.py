"""What the ranks of tests of compiled programs, copies and FSDP run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import note_passes
from rank_pool import told_by
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ringattn as ra
from ringattn.call.autograd import Runner
from ringattn.call.functional import _transports
from ringattn.call.handshake import call_index

TOKENS, WIDTH = 29, 32
in_graphs = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch.compile takes attention from torch 2.12 on")


def errors(rank: int) -> list[str]:
    """What each rank raises where one of them is wrong, in compiled programs."""

    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ra.ring_attention(q, k, k, "Causal()", layout="zigzag").sin()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 2, 8, 4)
    found = []
    for k in (q[:, :, : 8 - rank], q):
        token = call_index.set(1 + rank if k is q else 0)
        found.append(told_by(lambda k=k: (call if k is q else compiled)(q, k)))
        call_index.reset(token)
    return found


def order(rank: int) -> tuple[bool, list[tuple[str, int]]]:
    """Whether two independent compiled calls are the eager ones, and the passes of this rank."""

    def call(q: torch.Tensor, pattern: ra.Pattern, group: Any) -> torch.Tensor:
        a, b = (ra.ring_attention(x, x, x, pattern, layout="zigzag", group=group) for x in (q, q[:, 1:].sin()))
        return a.cos() * a.shape[1] + b.sum()

    layout = ra.make_layout("zigzag", tokens=TOKENS, ranks=2)
    q = layout.shard_tensor(torch.randn(1, 3, TOKENS, 8), rank).requires_grad_()
    pattern = ra.Causal() & ra.Documents([10, TOKENS - 10])
    wanted = call(q, pattern, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(wanted.sum(), q)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        passes = note_passes(patch, Runner, "forward", "backward")
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        out = compiled(q, pattern, dist.group.WORLD)
        (found,) = torch.autograd.grad(out.sum(), q)
        other = dist.new_group()
        assert other not in _transports
        compiled(q.detach(), pattern, other)
        assert other in _transports, "the graph of one group is not that of another"
    heads = [(kind, runner.plan.heads) for kind, runner in passes]
    return torch.equal(out, wanted) and torch.equal(found, gradient), heads


class Block(nn.Module):
    """A layer with attention, on the ranks of a mesh or on one device."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = ra.nn.MultiheadRingAttention(
            WIDTH, 4, ra.Causal(), batch_first=True, rotary=True, layer_norm=True, **options
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.attention(x)[0]))


def mixed_precision(rank: int) -> tuple[str, float]:
    """What pickling a module with a group says, and the error of FSDP's gradients on dp x cp ranks in bf16."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    layout = ra.make_layout("zigzag", tokens=TOKENS, ranks=2)
    torch.manual_seed(1)
    alone = Block()
    model = Block(mesh=mesh["cp"], layout="zigzag")
    model.load_state_dict(alone.state_dict())
    assert copy.deepcopy(model).attention.core._place is model.attention.core._place
    try:
        said = repr(pickle.dumps(model))
    except ra.InvalidInput as error:
        said = str(error)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"), mp_policy=policy)
    x, weights = torch.randn(1, TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH)
    (alone(x) * weights).sum().backward()
    out = model(layout.shard_tensor(x, rank, dim=1))
    assert out.dtype == torch.bfloat16
    (2 * (out.float() * layout.shard_tensor(weights, rank, dim=1)).sum()).backward()  # FSDP averages over 2 ranks
    wrong = 0.0
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == torch.float32
        difference = ours.grad.full_tensor() - theirs.grad  # type: ignore[attr-defined]
        wrong = max(wrong, float(difference.norm() / theirs.grad.norm()))
    return said, wrong
