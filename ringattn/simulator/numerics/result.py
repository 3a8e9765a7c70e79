"""The report of a numerics simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...plan.plan import Plan
from ...text import duration, plural, size
from ..reporting.console import Number
from .ledger import PairLedger

#: The parts of a real run that each mode executes.
MODES = {
    "sample": "sample: messages, kernel and merges of chosen rows; only whole ranks run the executor and a transport",
    "all": "all: the executor, with copies between ranks of one process as its transport",
}


@dataclass
class NumericsReport:
    """The result of a numerics check: what was executed and compared so far, and the largest errors.

    Each error is the largest absolute error, divided by the largest entry of the truth or by 1 if that is larger.
    """

    plan: Plan
    #: "sample" or "all".
    mode: str
    #: Number of executed ranks.
    ranks: int
    #: The largest accepted error.
    tolerance: float
    #: Number of query rows compared with an oracle.
    rows: int = 0
    #: Visits of the executed ranks, and the visits that the pattern requires.
    visits: int = 0
    visits_expected: int = 0
    #: Computed (query, key, head, branch) pairs of the compared rows (sample) or the executed ranks (all).
    pairs: int = 0
    pairs_expected: int = 0
    #: Number of rows, over all heads, whose ledger entries differ from the expected ones.
    wrong: int = 0
    #: Number of gradient rows, over all heads, with wrong counts; None without a backward.
    wrong_gradients: int | None = None
    error: float = 0.0
    lse_error: float = 0.0
    #: The largest error of dq, dk and dv on the compared rows; None without a backward.
    gradient_error: float | None = None
    seconds: float = 0.0
    calls: int = 0
    #: The most ranks executed at a time (all).
    live: int = 0
    #: Number of key rows whose dk and dv were compared with an oracle; dq is compared on the query rows (`rows`).
    keys: int = 0
    #: The error of products of gradients over all executed rows, over the root of their summed squares, or over 1.
    product_error: float | None = None
    #: What the executed ranks sent, and what the plan says they send (all).
    sent_bytes: int = 0
    sent_messages: int = 0
    planned_bytes: int = 0
    planned_messages: int = 0
    #: Messages from ranks that were not executed, provided by the input source.
    answered: int = 0
    #: Blocks that an executed rank expects but no rank sends (sample; in "all", the transport finds these).
    unsent: int = 0
    #: Keys of one row, over all heads, for which the tiles were compared with the pattern's `visible`, and keys for
    #: which they differ.
    mask_keys: int = 0
    wrong_mask_keys: int = 0

    def counts(self) -> dict[str, Any]:
        """Everything found so far, as plain data that `restore` takes."""
        return {name: value for name, value in vars(self).items() if name != "plan"}

    def restore(self, counts: dict[str, Any]) -> None:
        """Continue from the `counts` of an interrupted execution."""
        vars(self).update(counts)

    def add_ledger(self, computed: PairLedger, wanted: PairLedger) -> None:
        """Compare computed with expected pairs; add the number of pairs and of wrong rows to the report."""
        self.wrong += computed.wrong(wanted)
        self.pairs += int(computed.pairs.sum())
        self.pairs_expected += int(wanted.pairs.sum())
        self.calls += computed.calls

    def compare(self, out: torch.Tensor, lse: torch.Tensor, true_out: torch.Tensor, true_lse: torch.Tensor) -> None:
        """Compare outputs and log-sum-exps with the truth; keeps the largest errors."""
        self.error = max(self.error, gap(out, true_out))
        self.lse_error = max(self.lse_error, gap(lse, true_lse))

    def compare_gradient(self, found: torch.Tensor, exact: torch.Tensor, tag: int) -> None:
        """Compare a gradient with the exact one, without column `tag`, which contains a count instead."""
        worst = gap(*(x.index_fill(-1, torch.tensor(tag % x.shape[-1], device="cpu"), 0.0) for x in (found, exact)))
        self.gradient_error = max(self.gradient_error or 0.0, worst)

    @property
    def complete(self) -> bool:
        """Whether all checks of completeness passed: computed pairs, sent messages, and the pattern's tiles.

        The ledgers match, exactly the planned messages were sent, and the tiles agree with the mask.
        """
        wrong = (self.wrong, self.wrong_gradients, self.unsent, self.wrong_mask_keys)
        found = self.visits, self.sent_bytes, self.sent_messages
        return not any(wrong) and found == (self.visits_expected, self.planned_bytes, self.planned_messages)

    @property
    def accurate(self) -> bool:
        """True if no error is NaN or above the tolerance."""
        errors = (self.error, self.lse_error, self.gradient_error or 0.0, self.product_error or 0.0)
        return all(error <= self.tolerance for error in errors)

    @property
    def passed(self) -> bool:
        return self.complete and self.accurate

    def numbers(self) -> list[Number]:
        """The report as rows of a table."""
        plan = self.plan
        ledger = "complete" if self.complete else "NOT COMPLETE"
        ledger += f": {self.visits:,} of {plural(self.visits_expected, 'visit')}"
        ledger += f", {self.pairs:,} of {plural(self.pairs_expected, 'pair')}, {plural(self.wrong, 'row')} wrong"
        calls, rows = plural(self.calls, "call"), plural(plan.q_tokens, "query row")
        found = [
            Number("mode", MODES[self.mode]),
            Number("executed", f"{self.ranks:,} of {plural(plan.ranks, 'rank')}, {calls} of the kernel", "counted"),
            Number("compared", f"{self.rows:,} of {rows}, {plural(plan.heads, 'head')}", "counted"),
            Number("ledger", ledger, "counted"),
            Number("error", f"{self.error:.2e} (out), {self.lse_error:.2e} (lse), at most {self.tolerance:.2e} allowed",
                   "measured"),
        ]  # fmt: skip
        if self.gradient_error is not None:
            where = f"dq of {plural(self.rows, 'query row')}, dk and dv of {plural(self.keys, 'key row')}"
            found.append(Number("gradients", f"{self.gradient_error:.2e} ({where})", "measured"))
        if self.product_error is not None:
            text = f"{self.product_error:.2e} (v^T dv, k^T dk over all executed rows)"
            found.append(Number("gradient products", text, "measured"))
        if self.wrong_gradients is not None:
            found.append(Number("gradient ledger", f"{plural(self.wrong_gradients, 'row')} wrong", "counted"))
        if self.live:
            planned = f"{size(self.planned_bytes)} in {plural(self.planned_messages, 'message')}"
            sent = f"{size(self.sent_bytes)} in {plural(self.sent_messages, 'message')}"
            found.append(Number("sends", f"{sent}, planned {planned}", "counted"))
        if self.unsent:
            found.append(Number("never sent", plural(self.unsent, "received block"), "counted"))
        if self.mask_keys:
            text = f"{plural(self.mask_keys, 'key')} of one row, {self.wrong_mask_keys:,} differ"
            found.append(Number("tiles against visible", text, "counted"))
        if self.answered:
            text = f"{self.answered:,} messages of ranks that were not executed"
            found.append(Number("from the source", text, "counted"))
        if self.live:
            found.append(Number("at a time", f"{plural(self.live, 'rank')} at most", "counted"))
        return [*found, Number("time", duration(self.seconds), "measured")]


def gap(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest absolute error, divided by the largest entry of `exact` or by 1, whichever is larger.

    Infinite if an entry is NaN or infinite in only one of the tensors.
    """
    found, seen = found.double(), exact.isfinite()
    if not torch.equal(found.isfinite(), seen):
        return float("inf")
    if not seen.any():
        return 0.0
    return float((found[seen] - exact[seen]).abs().max() / exact[seen].abs().max().clamp(min=1.0))
