"""All-gather, the baseline that other libraries recommend: every rank gets every block at once, needed or not."""

from __future__ import annotations

from ..steps import Hop, Kind, Part, Step
from .base import EXACT_RANKS, Schedule, sampled_owners


class AllGatherSchedule(Schedule):
    """A schedule in which every rank sends its whole block to all other ranks at once."""

    def forward(self, rank: int) -> tuple[Step, ...]:
        """What a rank does in the forward: it computes with its own block during the gather, then with all others."""
        return self._gather(rank, ("kv",))

    def backward(self, rank: int) -> tuple[Step, ...]:
        """What a rank does in the backward: it gathers all keys again, and sends gradients straight to the owners."""
        return self._send_home(rank, self.forward(rank), "grad")

    def forward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """What a rank does in a forward that gathers all queries; their (out, lse) go straight back to the owners."""
        return self._send_home(rank, self._gather(rank, ("query",)), "part")

    def backward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """What a rank does in a backward that gathers all queries; `demand` must be a `QueryDemand`."""
        return self._send_home(rank, self._gather(rank, ("row", "q")), "dq")

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int]:
        """(bytes between nodes, all bytes) of a backward: blocks are gathered, gradients go back to the owners.

        Arguments as in `Schedule`.
        """
        demand, ranks = self.demand, self.demand.layout.ranks
        sampled = min(ranks - 1, EXACT_RANKS)
        sent = 0
        for owner in sampled_owners(demand):
            rows = demand.block_heads * demand.layout.rows(owner)
            # Keys and queries have the same visits, so a few of many ranks show which of the two sends less.
            others = (owner + 1 + i * (ranks - 1) // sampled for i in range(sampled))
            visitors = sum(demand.visits(other % ranks, owner) for other in others) * (ranks - 1) // sampled
            sent += rows * ((ranks - 1) * block + visitors * sums)
        return sent, sent

    def _gather(self, rank: int, kinds: tuple[Kind, ...]) -> tuple[Step, ...]:
        """A step that gathers parts of these kinds, then a step with the visits to gathered parts of the last kind."""
        layout, visited = self.demand.layout, kinds[-1]

        def parts_of(owner: int) -> tuple[Part, ...]:
            return tuple(Part(kind, owner) for kind in kinds)

        filled = [other for other in self._others(rank) if layout.rows(other)]
        gather = Step(
            sends=tuple(Hop(peer, 0, parts_of(rank), 0) for peer in self._others(rank)) if layout.rows(rank) else (),
            recvs=tuple(Hop(peer, 0, parts_of(peer), 0) for peer in filled),
            visits=(Part(visited, rank),) if self.demand.visits(rank, rank) else (),
        )
        visit = Step(visits=tuple(Part(visited, other) for other in filled if self.demand.visits(rank, other)), clock=1)
        return tuple(step for step in (gather, visit) if step)

    def _send_home(self, rank: int, steps: tuple[Step, ...], kind: Kind) -> tuple[Step, ...]:
        """`steps`, then a last step in which the sums of the gathered blocks go to their owners."""
        others, last = self._others(rank), len(steps)
        home = Step(
            sends=tuple(
                Hop(owner, 1, (Part(kind, owner),), last) for owner in others if self.demand.visits(rank, owner)
            ),
            recvs=tuple(Hop(peer, 1, (Part(kind, rank),), last) for peer in others if self.demand.visits(peer, rank)),
            clock=2,
        )
        return (*steps, home) if home else steps

    def _others(self, rank: int) -> list[int]:
        ranks = self.demand.layout.ranks
        return [(rank + i) % ranks for i in range(1, ranks)]
