"""The loss of sharded tokens against one cross entropy of all logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ringattn import InvalidInput
from ringattn.train import count_labels, linear_cross_entropy, mean_over_ranks

CLASSES, WIDTH, TOKENS = 50, 12, 41


def make() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden, weight, bias, labels), a fourth of the labels ignored."""
    source = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, generator=source, dtype=torch.float64)
        for shape in ((2, TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    labels = torch.randint(CLASSES, (2, TOKENS), generator=source)
    labels[torch.rand(labels.shape, generator=source) < 0.25] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("chunk", [1, 7, 82, 1000])
def test_chunks_do_not_change_the_loss(chunk: int) -> None:
    hidden, weight, bias, labels = make()
    leaves = [x.float().requires_grad_() for x in (hidden, weight, bias)]
    exact = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2], chunk=chunk)
    truth = F.cross_entropy(F.linear(*exact).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss.double(), truth, atol=1e-5, rtol=0)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(truth, exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=0)


def on_ranks(rank: int) -> tuple[float, list[list[float]]]:
    """The mean loss of 3 ranks with uneven tokens, and the mean of the gradients."""
    import torch.distributed as dist

    hidden, weight, bias, labels = make()
    mine = slice(*((0, 5), (5, 35), (35, TOKENS))[rank])
    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    if rank == 2:
        labels[:, mine] = -100  # a rank without any label
    loss = linear_cross_entropy(hidden[:, mine], leaves[0], labels[:, mine], bias=leaves[1], chunk=4)
    gradients = torch.autograd.grad(loss, leaves)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return float(mean_over_ranks(loss)), [(g / 3).flatten().tolist() for g in gradients]


def test_the_mean_over_ranks_is_the_loss_of_all_tokens(run_ranks) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, bias, labels = make()
    labels[:, 35:] = -100
    leaves = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    truth = F.cross_entropy(F.linear(hidden, *leaves).flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(truth, leaves)
    for loss, gradients in run_ranks(on_ranks, 3):
        assert loss == pytest.approx(float(truth), rel=1e-12)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs.flatten(), atol=1e-12, rtol=0)


def test_a_given_total_replaces_the_count() -> None:
    hidden, weight, bias, labels = make()
    parts = [
        linear_cross_entropy(hidden[:, i], weight, labels[:, i], bias=bias, total=int((labels != -100).sum()))
        for i in (slice(0, 9), slice(9, TOKENS))
    ]
    torch.testing.assert_close(sum(parts), linear_cross_entropy(hidden, weight, labels, bias=bias))


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    hidden, weight, _, labels = make()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert float(loss.detach()) == 0.0 and not hidden.grad.any()  # type: ignore[union-attr]
    assert int(count_labels(labels)) == int((labels != -100).sum())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(5, 3)}, "weight"),
        ({"labels": torch.zeros(3)}, "pass hidden states"),
        ({"chunk": 0}, "chunk must"),
    ],
)
def test_errors(change: dict[str, object], words: str) -> None:
    hidden, weight, _, labels = make()
    with pytest.raises(InvalidInput, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})  # type: ignore[arg-type]
