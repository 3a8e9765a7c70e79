"""Faults and wrong gradients are seen, and what cannot be simulated is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from numerics_cases import PERIOD, make
from planted import FAULT_KINDS, GRADIENT_FAULTS, Fault, numerics_with

import ringattn as ra
from ringattn.errors import InvalidInput, Unsupported
from ringattn.kernels import get_kernel
from ringattn.kernels.base import Kernel
from ringattn.pattern import Pattern
from ringattn.plan.work import Work
from ringattn.simulator.numerics import numerics


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [(ra.Full(), 10), (ra.Causal(), 12), (ra.Window(40), 16), (ra.Dilated((64,), (2,), causal=True), 16)],
    ids=repr,
)
def test_every_fault_is_caught_in_both_modes(pattern: Pattern, ranks: int) -> None:
    plan = make(pattern, tokens=8 * ranks, ranks=ranks, heads=1, kv_heads=1)
    hurt = ranks * 3 // 4 + 1
    rows = [hurt * 8, hurt * 8 + 6, hurt * 8 + 10, 8 * ranks - 1]
    assert numerics(plan, rows=rows, period=PERIOD).passed
    assert numerics(plan, mode="all", backward=True, period=PERIOD).passed
    for fault in FAULT_KINDS:
        where = Fault(fault, hurt, hurt if fault in GRADIENT_FAULTS else hurt - 1)
        reports = [numerics_with(where, plan, mode="all", backward=True)]
        if fault not in GRADIENT_FAULTS:
            reports.append(numerics_with(where, plan, rows=rows))
        for report in reports:
            assert not report.accurate, (fault, report)
            assert not report.complete, (fault, report)


class WrongGradients(Kernel):
    """A kernel whose gradients are changed before they leave it, where the ledger does not look."""

    def __init__(self, inner: Kernel, change: Callable[[torch.Tensor], torch.Tensor], which: int | None = None) -> None:
        self.inner, self.change, self.which, self.name, self.calls = inner, change, which, inner.name, 0

    def check(self, *tensors: torch.Tensor) -> None:
        self.inner.check(*tensors)

    def split(self, work: Work) -> Iterator[Work]:
        return self.inner.split(work)

    def forward(self, *given: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.forward(*given)  # type: ignore[arg-type]

    def backward(self, *given: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self.inner.backward(*given)  # type: ignore[arg-type]
        some = range(3) if self.which is None else [self.which]
        return tuple(self.change(x) if i in some else x for i, x in enumerate(found))  # type: ignore[return-value]


WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int | None]] = {
    "zeroed": (torch.zeros_like, None),
    "dk zeroed": (torch.zeros_like, 1),
    "columns in another order": (lambda x: x.flip(-1), None),
    "1 % too large": (lambda x: x * 1.01, None),
    "dv of one row": (lambda x: x * (1 + 1e-2 * (torch.arange(x.shape[2])[:, None] == 5)), 2),
    "dq of one row": (lambda x: x * (1 + 1e-2 * (torch.arange(x.shape[2])[:, None] == 5)), 0),
    "dk of one row": (lambda x: x * (1 + 1e-2 * (torch.arange(x.shape[2])[:, None] == 5)), 1),
    "two rows of dv swapped": (lambda x: _swap(x, 20, 21), 2),
    "two rows of dk swapped": (lambda x: _swap(x, 20, 21), 1),
    "two rows of dq swapped": (lambda x: _swap(x, 20, 21), 0),
}


def _swap(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Rows a and b of a gradient have changed places, where there are so many rows."""
    order = list(range(x.shape[2]))
    if b < len(order):
        order[a], order[b] = b, a
    return x[:, :, order]


@pytest.mark.parametrize("pattern", [ra.Causal(), ra.Dilated((128, 256), (1, 2), mix="group")], ids=repr)
@pytest.mark.parametrize("wrong", [None, *WRONG])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_wrong_gradients_are_seen(
    pattern: Pattern, wrong: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["ringattn.simulator.numerics.whole"]
    if wrong is not None:
        change, which = WRONG[wrong]
        monkeypatch.setattr(module, "get_kernel", lambda *given: WrongGradients(get_kernel(*given), change, which))
    layout = "zigzag" if pattern == ra.Causal() else "contiguous"
    plan = make(pattern, tokens=512, ranks=4, layout=layout, dtype=dtype)
    report = numerics(plan, mode="all", backward=True, period=PERIOD)
    assert report.accurate == (wrong is None), (wrong, report)
    # Few rows show in the products, sampled or not.
    rows = wrong is not None and (" row " in wrong or "swapped" in wrong)
    assert not rows or report.product_error > report.tolerance
    assert (report.rows, report.keys) == (4 * 16, 4 * 16)
    assert report.gradient_error is not None and report.product_error is not None


def test_what_cannot_be_simulated_is_refused() -> None:
    plan = make(ra.Causal())
    for options, words in (
        ({"mode": "al"}, "did you mean 'all'"),
        ({"period": 36}, "must be a prime"),
        ({"ranks": [1]}, "mode='all'"),
        ({"backward": True}, "executes only the forward"),
        ({"rows": [256]}, "distinct query positions"),
        ({"rows": [3, 3]}, "distinct query positions"),
        ({"mode": "all", "together": 0}, "together=0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            numerics(plan, **{"period": PERIOD, **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="divides the 37 rows"):
        numerics(make(ra.Full(), tokens=37 * 8), period=37)
    with pytest.raises(InvalidInput, match="need fp64"):
        numerics(make(ra.Full(), dtype="float32"), period=PERIOD)
    with pytest.raises(InvalidInput, match="positions of the sequence exactly"):
        numerics(make(ra.Full(), dtype="bfloat16"), mode="all", period=PERIOD)
    with pytest.raises(InvalidInput, match="at least 3"):
        numerics(make(ra.Full(), head_dim=2), period=PERIOD)
    with pytest.raises(Unsupported, match="all-to-all of Ulysses"):
        numerics(make(ra.Full(), schedule="ulysses(2)"), mode="all", period=PERIOD)
    with pytest.raises(Unsupported, match="all blocks at once"):
        numerics(make(ra.Full(), schedule="allgather"), period=PERIOD)
    with pytest.raises(Unsupported, match="would round the tags"):
        numerics(make(ra.Full(), dtype="float32", comm_dtype="bfloat16"), mode="all", period=PERIOD)
