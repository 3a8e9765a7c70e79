"""Gradient checkpointing that keeps the results of attention and recomputes everything else, without the ring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import replace

from ..errors import InvalidInput
from .executor import Forward


class _Tape:
    """The results of the attention calls of one checkpointed function, in their order."""

    def __init__(self) -> None:
        #: Every result, with the version counter of its output at the time of the call.
        self.results: list[tuple[Forward, int]] = []
        self.replaying = False
        #: The index of the next result to replay.
        self.place = 0


_tape: ContextVar[_Tape | None] = ContextVar("ringattn_tape", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for torch.utils.checkpoint: the recomputation takes (out, lse) of attention from the forward.

    `checkpoint(layer, x, use_reentrant=False, context_fn=ringattn.keep_attention)` recomputes the layer in the
    backward without another pass around the ring: q, k and v are recomputed, and the output of every attention in the
    layer is kept. This costs the memory of out, lse and the block that the ring's backward starts from. Without
    `keep_attention` nothing is kept, and the ring runs once more.
    """
    tape = _Tape()
    return _TapeContext(tape, replaying=False), _TapeContext(tape, replaying=True)


class _TapeContext:
    """A context in which calls of attention write to the tape or, with `replaying`, read from it. Reusable."""

    def __init__(self, tape: _Tape, *, replaying: bool) -> None:
        self.tape, self.replaying = tape, replaying
        self.tokens: list[Token[_Tape | None]] = []

    def __enter__(self) -> None:
        self.tape.replaying, self.tape.place = self.replaying, 0
        self.tokens.append(_tape.set(self.tape))

    def __exit__(self, *failure: object) -> None:
        _tape.reset(self.tokens.pop())


def keeping() -> bool:
    """Whether `keep_attention` keeps the tensors that attention returns, which must then not be changed in place."""
    return _tape.get() is not None


def run_or_replay(run: Callable[[], Forward]) -> Forward:
    """`run()`, or in a recomputation the result of the same call in the forward.

    Raises InvalidInput if the recomputation differs from the forward, or if a kept output was changed in place.
    """
    tape = _tape.get()
    if tape is None:
        return run()
    if not tape.replaying:
        result = run()
        # The caller gets `result.out` with its autograd history; the tape holds the numbers only.
        tape.results.append((replace(result, out=result.out.detach(), lse=result.lse.detach()), result.out._version))
        return result
    if tape.place == len(tape.results):
        raise InvalidInput(
            f"the recomputation calls attention more often than the forward did ({len(tape.results)} times); "
            "let the checkpointed function make the same calls both times"
        )
    result, version = tape.results[tape.place]
    tape.place += 1
    if result.out._version != version:
        raise InvalidInput(
            "the output of attention was changed in place after a forward with keep_attention, which keeps the output "
            "for the backward; change a copy, or checkpoint without keep_attention"
        )
    return replace(result, out=result.out.detach(), lse=result.lse.detach())
