"""The textbook ring against fp64 autograd of a dense mask, and as an oracle of `ring_attention`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imported import import_file

import ringattn as ra

PAGE = Path(__file__).resolve().parents[1] / "examples" / "textbook_ring.py"
ROWS = 7


def attend_both(rank: int, causal: bool) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(textbook, ring_attention, dense) of this rank's rows of out, dq, dk and dv, in fp64."""
    textbook = import_file(PAGE)
    ranks, source = dist.get_world_size(), torch.Generator().manual_seed(5)
    whole = [torch.randn(2, 3, ROWS * ranks, 8, generator=source, dtype=torch.float64) for _ in range(4)]
    own = slice(rank * ROWS, (rank + 1) * ROWS)

    def run(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        *inputs, grad = (x.clone() for x in tensors)
        out = attend(*(x.requires_grad_() for x in inputs))
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * 8**-0.5
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(future & torch.tensor(causal), -torch.inf).softmax(-1) @ v

    local, pattern = [x[:, :, own] for x in whole], ra.Causal() if causal else ra.Full()
    ours = run(lambda q, k, v: textbook.RingAttention.apply(q, k, v, causal), local)
    theirs = run(lambda q, k, v: ra.ring_attention(q, k, v, pattern, layout="contiguous"), local)
    return list(zip(ours, theirs, [x[:, :, own] for x in run(dense, whole)], strict=True))


@pytest.mark.multi
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_textbook_is_right(ranks: int, causal: bool, run_ranks: Callable[..., list[Any]]) -> None:
    for of_rank in run_ranks(attend_both, ranks, causal):
        for textbook, ring, dense in of_rank:
            assert (textbook - dense).abs().max() <= 1e-13 and (ring - dense).abs().max() <= 1e-13


def test_the_textbook_fits_on_a_page() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 80 and "import ringattn" not in text
