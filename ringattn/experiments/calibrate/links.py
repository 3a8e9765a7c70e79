"""Times of messages: there and back between two ranks, and from every rank to its neighbour while all others send too."""

from __future__ import annotations

from collections.abc import Sequence

from .team import Team


def ping_pong(team: Team, sizes: Sequence[int], repeat: int) -> list[tuple[int, list[float]]]:
    """(bytes, seconds one way) of messages between ranks 0 and 1 while all other ranks wait; half of there and back."""
    found = []
    for size in sizes:
        mine, theirs = team.buffer(size), team.buffer(size)

        def turn(mine=mine, theirs=theirs) -> None:  # type: ignore[no-untyped-def]
            if team.rank == 0:
                team.finish(team.exchange({1: mine}, {}))
                team.finish(team.exchange({}, {1: theirs}))
            elif team.rank == 1:
                team.finish(team.exchange({}, {0: theirs}))
                team.finish(team.exchange({0: mine}, {}))

        seconds = team.repeated(turn, repeat)
        found.append((size, [t / 2 for rank in team.everyone(seconds)[:2] for t in rank]))
    return found


def shift(team: Team, sizes: Sequence[int], repeat: int, *, near: bool) -> list[tuple[int, list[float]]]:
    """(bytes, seconds) of messages from every rank to the next one of its node (near), or to its peer on the next node."""
    node, place = divmod(team.rank, team.inner)
    nodes = team.size // team.inner

    def peer(step: int) -> int:
        if near:
            return node * team.inner + (place + step) % team.inner
        return (node + step) % nodes * team.inner + place

    found = []
    for size in sizes:
        mine, theirs = team.buffer(size), team.buffer(size)

        def turn(mine=mine, theirs=theirs) -> None:  # type: ignore[no-untyped-def]
            team.finish(team.exchange({peer(1): mine}, {peer(-1): theirs}))

        seconds = team.repeated(turn, repeat)
        found.append((size, [t for rank in team.everyone(seconds) for t in rank]))
    return found
