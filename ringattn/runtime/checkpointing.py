"""Gradient checkpointing that does not repeat the ring: attention results are kept, everything else is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import replace

from ..errors import InvalidInput
from .executor import Forward


class _Tape:
    """Results of the attention calls of one checkpointed function, in their order."""

    def __init__(self) -> None:
        self.results: list[tuple[Forward, int]] = []
        self.replaying = False
        self.place = 0


_tape: ContextVar[_Tape | None] = ContextVar("ringattn_tape", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for torch.utils.checkpoint: the recomputation takes (out, lse) of attention from the forward.

    `checkpoint(layer, x, use_reentrant=False, context_fn=ringattn.keep_attention)` recomputes the layer in the
    backward without another pass around the ring: q, k and v are made anew, the output of every attention in the
    layer is kept. Costs the memory of out, lse and the block that the ring's backward starts from; without it,
    nothing is kept and the ring runs once more.
    """
    tape = _Tape()
    return _Using(tape, replaying=False), _Using(tape, replaying=True)


class _Using:
    """Calls of attention in this context write to the tape, or read from it. Can be entered again and again."""

    def __init__(self, tape: _Tape, *, replaying: bool) -> None:
        self.tape, self.replaying = tape, replaying
        self.tokens: list[Token[_Tape | None]] = []

    def __enter__(self) -> None:
        self.tape.replaying, self.tape.place = self.replaying, 0
        self.tokens.append(_tape.set(self.tape))

    def __exit__(self, *failure: object) -> None:
        _tape.reset(self.tokens.pop())


def keeping() -> bool:
    """True inside `keep_attention`: the tape holds the tensors that attention returns, so that nobody may change them."""
    return _tape.get() is not None


def computed(run: Callable[[], Forward]) -> Forward:
    """`run()`, or what it gave when the function that is being recomputed ran first."""
    tape = _tape.get()
    if tape is None:
        return run()
    if not tape.replaying:
        result = run()
        # The caller gets `result.out` itself, with a history; the tape holds the bare numbers.
        tape.results.append((replace(result, out=result.out.detach(), lse=result.lse.detach()), result.out._version))
        return result
    if tape.place == len(tape.results):
        raise InvalidInput(
            f"the recomputation calls attention more often than the forward did ({len(tape.results)} times); "
            "a checkpointed function must do the same both times"
        )
    result, version = tape.results[tape.place]
    tape.place += 1
    if result.out._version != version:
        raise InvalidInput(
            "the output of attention was changed in place after a forward with keep_attention, which keeps it for the "
            "backward; change a copy, or checkpoint without keep_attention"
        )
    return replace(result, out=result.out.detach(), lse=result.lse.detach())
