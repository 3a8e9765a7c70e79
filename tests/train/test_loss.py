"""The loss of sharded tokens against one cross entropy of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringattn import InvalidInput
from ringattn.errors import RingAttentionError
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


class Largest(TorchDispatchMode):
    """Sees how many elements the largest tensor has that an op returns."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_no_tensor_is_larger_than_the_logits_of_a_chunk() -> None:
    hidden, weight, _, labels = make()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with Largest() as largest:
        torch.autograd.grad(linear_cross_entropy(*leaves, labels, chunk=21), leaves)
    assert largest.most == 21 * CLASSES < labels.numel() * CLASSES / 3


def test_a_given_total_replaces_the_count() -> None:
    hidden, weight, bias, labels = make()
    parts = [
        linear_cross_entropy(hidden[:, i], weight, labels[:, i], bias=bias, total=int((labels != -100).sum()))
        for i in (slice(0, 9), slice(9, TOKENS))
    ]
    torch.testing.assert_close(sum(parts), linear_cross_entropy(hidden, weight, labels, bias=bias))


def test_labels_are_counted_against_the_given_ignore_index() -> None:
    hidden, weight, _, labels = make()
    labels = torch.where(labels == -100, 7, labels)
    truth = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten(), ignore_index=7)
    torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, ignore_index=7), truth)
    assert int(count_labels(labels, ignore_index=7)) == sum(x != 7 for row in labels.tolist() for x in row)


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    hidden, weight, _, labels = make()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert float(loss.detach()) == 0.0 and not hidden.grad.any()  # type: ignore[union-attr]
    assert int(count_labels(labels)) == int((labels != -100).sum())


def with_labels(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Labels of `make`, one of them replaced."""
    labels = make()[3]
    labels[0, 3] = value
    return labels.to(dtype)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(5, 3)}, "weight"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "pass hidden states"),
        ({"chunk": 0}, "chunk must"),
        ({"labels": with_labels(0, torch.int32)}, "labels must be an int64 tensor of classes, got torch.int32"),
        ({"labels": [1, 2]}, "got list"),
        ({"labels": with_labels(CLASSES)}, "label 50 is not among the 50 classes"),
        ({"labels": with_labels(-1)}, "label -1 is not among the 50 classes"),
        ({"weight": make()[1].float()}, "one dtype, got torch.float64, torch.float32"),
        ({"ignore_index": 1.5}, "ignore_index, the label of rows without a loss, must be an integer, got 1.5"),
        ({"total": "3"}, "total must be the number of labels of all ranks, got '3'; try count_labels"),
    ],
)
def test_errors(change: dict[str, object], words: str) -> None:
    hidden, weight, _, labels = make()
    with pytest.raises(InvalidInput, match=words):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})  # type: ignore[arg-type]


def wrong_on_one_rank(rank: int) -> list[str]:
    """What the ranks say to rank 1 with other labels, ignore_index or classes; alone in its group a rank has a loss."""
    import torch.distributed as dist

    hidden, weight, _, labels = make()
    found = []
    for call in (
        lambda: linear_cross_entropy(hidden, weight, labels[:, rank % 2 :]),
        lambda: count_labels(labels.int() if rank == 1 else labels),
        lambda: count_labels(labels, ignore_index=-99 if rank == 1 else -100),
        lambda: linear_cross_entropy(hidden, weight[:-1] if rank == 1 else weight, labels.clamp(max=40)),
    ):
        with pytest.raises(RingAttentionError) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    alone = [dist.new_group([other]) for other in range(3)][rank]
    own = linear_cross_entropy(hidden[:, rank:], weight, labels[:, rank:], group=alone)
    truth = F.cross_entropy(F.linear(hidden, weight)[:, rank:].flatten(0, 1), labels[:, rank:].flatten())
    torch.testing.assert_close(own, truth)
    return found


def test_an_error_of_one_rank_reaches_all(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for rank, (shape, dtype, *differing) in enumerate(run_ranks(wrong_on_one_rank, 3)):
        if rank == 1:
            assert shape.startswith("InvalidInput: hidden must be") and dtype.startswith("InvalidInput: labels must")
        else:
            assert shape.startswith("Mismatch: rank 1 cannot take part: hidden must be")
            assert dtype.startswith("Mismatch: rank 1 cannot take part: labels must")
        for text, values in (("ignore_index", (-100, -99, -100)), ("number of classes", (50, 49, 50))):
            first, other = values[:2]
            assert f"disagree about {text}: {first} on ranks 0, 2; {other} on rank 1" in "".join(differing)


class Head(torch.nn.Module):
    """The last projection and the loss in one module, as FSDP2 needs."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, labels, chunk=4)


def sharded(rank: int) -> tuple[str, list[float]]:
    """What is said to the weight outside of a wrapped module, and its gradient by FSDP2 on uneven tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    hidden, weight, _, labels = make()
    mine = slice(*((0, 5), (5, 35), (35, TOKENS))[rank])
    head = Head(weight)
    fully_shard(head, mesh=init_device_mesh("cpu", (3,)))
    with pytest.raises(InvalidInput) as caught:
        linear_cross_entropy(hidden[:, mine], head.weight, labels[:, mine])
    head(hidden[:, mine], labels[:, mine]).backward()
    return str(caught.value), head.weight.grad.full_tensor().flatten().tolist()  # type: ignore[union-attr, operator]


def test_fsdp2_averages_to_the_gradient_of_all_tokens(run_ranks) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, _, labels = make()
    weight.requires_grad_()
    F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten()).backward()
    for error, gradient in run_ranks(sharded, 3):
        assert error.startswith("weight is a DTensor")
        found = torch.tensor(gradient, dtype=torch.float64)
        torch.testing.assert_close(found, weight.grad.flatten(), atol=1e-12, rtol=0)  # type: ignore[union-attr]
