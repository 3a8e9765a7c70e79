"""All-gather: everyone gets every block at once, needed or not. The baseline that other libraries recommend."""

from __future__ import annotations

from ..steps import Hop, Kind, Part, Step
from .base import Schedule


class AllGatherSchedule(Schedule):
    """No route: whole blocks go to everybody at once."""

    def held(self, rank: int) -> tuple[Part, ...]:
        """Nothing is kept after the forward."""
        return ()

    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's forward: its own visit under the gather, then all others."""
        return self._gather(rank, ("kv",))

    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which everyone gets all keys again; gradients go straight home."""
        return self._home(rank, self.forward(rank), "grad")

    def queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which everyone gets all queries. The demand is one of blocks of those."""
        return self._home(rank, self._gather(rank, ("row", "q")), "dq")

    def _gather(self, rank: int, kinds: tuple[Kind, ...]) -> tuple[Step, ...]:
        layout, visited = self.demand.layout, kinds[-1]

        def parts(owner: int) -> tuple[Part, ...]:
            return tuple(Part(kind, owner) for kind in kinds)

        filled = [other for other in self._others(rank) if layout.rows(other)]
        gather = Step(
            sends=tuple(Hop(peer, 0, parts(rank), 0) for peer in self._others(rank)) if layout.rows(rank) else (),
            recvs=tuple(Hop(peer, 0, parts(peer), 0) for peer in filled),
            visits=(Part(visited, rank),) if self.demand.visits(rank, rank) else (),
        )
        visit = Step(visits=tuple(Part(visited, other) for other in filled if self.demand.visits(rank, other)))
        return tuple(step for step in (gather, visit) if step)

    def _home(self, rank: int, steps: tuple[Step, ...], kind: Kind) -> tuple[Step, ...]:
        """The steps, and after them one in which what was gathered goes to the owners."""
        others, last = self._others(rank), len(steps)
        home = Step(
            sends=tuple(
                Hop(owner, 1, (Part(kind, owner),), last) for owner in others if self.demand.visits(rank, owner)
            ),
            recvs=tuple(Hop(peer, 1, (Part(kind, rank),), last) for peer in others if self.demand.visits(peer, rank)),
        )
        return (*steps, home) if home else steps

    def _others(self, rank: int) -> list[int]:
        ranks = self.demand.layout.ranks
        return [(rank + i) % ranks for i in range(1, ranks)]
