"""`top_keys`: the keys that each query attends to, chosen by an indexer's scores over the keys of all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InvalidInput, Unsupported
from ..kernels.chosen import TopKeys, move_rows
from ..kernels.memory import is_dense, wide
from ..layout.regular import Layout
from ..pattern import Pattern
from ..pattern.base import check_integer
from ..plan.schedules import resolve
from ..runtime.passes import forward
from ..runtime.ring import Job
from ..text import shown
from ..transport.base import Tags
from ..transport.records import ErrorReport
from ..transport.virtual import VirtualRanks
from .arguments import computing
from .compile import compile_call
from .functional import find_ranks, run_programs
from .handshake import agree
from .rows import Rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..transport.base import Transport


@torch.no_grad()
def top_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    pattern: Pattern | str,
    *,
    layout: str | Layout,
    q_layout: str | Layout | None = None,
    schedule: str = "ring",
    ranks: int | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    transport: Transport | None = None,
) -> Tensor:
    """The keys that an indexer chooses for each query, among those that it sees by the pattern. Collective.

    q [B, H, n, D], k [B, G, n, D] and weights [B, H, n] are the indexer's queries, keys and weights of this rank's
    rows, in the places of `ring_attention`; with `ranks`, virtual ranks, they are whole tensors. H is a multiple of G.
    The score of a key is the sum over the heads h of its group of weights[h] * relu(q[h] . k), in fp32 (fp64 for fp64).
    The `count` largest scores are chosen; of equal scores, those of lower positions.

    Returns the positions int32 [B, G, n, count], best first, and -1 where a query sees fewer keys: what `chosen=` of
    `ring_attention` takes. They are the same for any number of ranks and any layout. Only k travels. No gradient.
    Raises InvalidInput, Unsupported or Mismatch on every rank.
    """
    place, local = find_ranks(group, mesh, transport, ranks)
    ring = None if isinstance(place, VirtualRanks) else place
    with nullcontext() if ring is None else ErrorReport(ring, "call"):
        count = check_integer(count, "count", 1, "count=2048")
        if (
            not all(is_dense(x) and x.ndim == 4 for x in (q, k))
            or not is_dense(weights)
            or weights.shape != q.shape[:3]
        ):
            raise InvalidInput(
                f"top_keys takes q, k [batch, heads, tokens, dim] and weights [batch, heads, tokens], got "
                f"{', '.join(str(tuple(x.shape)) if is_dense(x) else shown(x) for x in (q, k, weights))}"
            )
        if resolve(schedule).startswith("ulysses"):
            raise Unsupported(f"schedule={schedule!r} splits the heads that a score sums; try schedule='ring'")
        dtype = wide(q.dtype)
        both = torch.cat([q.to(dtype), weights.to(dtype).unsqueeze(-1)], -1)
        rows = Rows(k, expand=lambda k: (pad(k.to(dtype), (0, 1)),) * 2)
        options = {"schedule": schedule, "kernel": "reference", "rotate": "kv"}
        call = compile_call(both, rows, None, pattern, layout, options, q_layout=q_layout)
    if ring is None:
        plan, number = call.plan(call.rows, call.q_rows, len(local), call.layout, call.q_layout), 0
    else:
        plan, _, number = agree(ring, call, f"call of top_keys, count={count}")
    of_q, of_k = plan.layout_of("q"), plan.layout
    if plan.stacked:
        both, k = of_q.stack(both), of_k.stack(k)
    shards: Any = [(both, k)] if ring is not None else zip(of_q.shard_all(both), of_k.shard_all(k), strict=True)
    jobs = [Job(plan, rank, TopKeys(count), 1.0) for rank in local]
    tags = Tags.of_call(number, backward=False)
    programs = [forward(job, x, (y,), save=False, tags=tags) for job, (x, y) in zip(jobs, shards, strict=True)]
    with computing(q.device), nullcontext() if ring is None else ErrorReport(ring, "call", deferred=True):
        found = [result.out for result in run_programs(programs, place)]
    chosen = found[0] if ring is not None else of_q.unshard_tensor(found)
    return move_rows(of_q.unstack(chosen), -plan.stride) if plan.stacked else chosen
