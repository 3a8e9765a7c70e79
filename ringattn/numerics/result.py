"""What a simulation of the numerics found, with the kind of every number."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import plural
from ..plan.plan import Plan
from ..reporting.console import Number
from ..text import duration

#: What each mode executes of a real run.
WAYS = {
    "sample": "sample: hops, kernel and merges of chosen rows; neither executor nor transport runs, as they do with way=all",
    "all": "all: the executor, with copies between ranks of one process as its transport",
}


@dataclass(frozen=True)
class NumericsReport:
    """Errors are the largest absolute ones over the largest entry of the truth, or over 1 where that is smaller."""

    plan: Plan
    #: "sample" or "all".
    mode: str
    #: Ranks that were executed, and query rows that were compared with an oracle.
    ranks: int
    rows: int
    #: Blocks that the executed ranks visited, and those that the pattern asks for.
    visits: int
    visits_expected: int
    #: (query, key, head, branch) pairs that were computed, of the compared rows (sample) or executed ranks (all).
    pairs: int
    pairs_expected: int
    #: Rows, of all heads, whose ledger is not the expected one; None where no ledger was kept.
    wrong: int | None
    #: Rows of gradients (in `sample`: rows of dq and blocks of dk), of all heads, whose counts are not the expected ones;
    #: None without a backward or a ledger.
    wrong_gradients: int | None
    error: float
    lse_error: float
    #: Of dq, dk, dv together, on the compared rows; None without a backward.
    gradient_error: float | None
    #: The most that each of the errors may be.
    tolerance: float
    seconds: float
    calls: int
    #: The most shards of K/V that existed at a time in `sample`; ranks that were executed at a time in `all`.
    live: int
    #: Key rows whose dk and dv were compared with an oracle of their own. dq was compared on the compared query rows.
    keys: int = 0
    #: Ranks all of whose rows and gradients were compared with a dense oracle, in `all`.
    dense: int = 0
    #: In `all`: sums of the gradients of all executed rows against what they must be, over the sums of their absolute values.
    sum_error: float | None = None
    #: Messages from ranks that were not executed, which the source answered.
    answered: int = 0

    @property
    def complete(self) -> bool:
        """Whether the ledger is exactly the expected one, as far as one was kept."""
        return not self.wrong and not self.wrong_gradients and self.visits == self.visits_expected

    @property
    def accurate(self) -> bool:
        """Whether no error is above the tolerance; NaN is."""
        errors = (self.error, self.lse_error, self.gradient_error or 0.0, self.sum_error or 0.0)
        return all(error <= self.tolerance for error in errors)

    @property
    def passed(self) -> bool:
        return self.complete and self.accurate

    def numbers(self) -> list[Number]:
        """The report as lines for `report.show`."""
        plan = self.plan
        ledger = "not kept"
        if self.wrong is not None:
            ledger = "complete" if self.complete else "NOT COMPLETE"
            ledger += f": {self.visits:,} of {plural(self.visits_expected, 'visit')}, {self.pairs:,} of {plural(self.pairs_expected, 'pair')}"
            ledger += f", {plural(self.wrong, 'row')} wrong"
        found = [
            Number("way", WAYS[self.mode]),
            Number("executed", f"{self.ranks:,} of {plural(plan.ranks, 'rank')}, {plural(self.calls, 'call')} of the kernel", "counted"),
            Number("compared", f"{self.rows:,} of {plural(plan.tokens, 'query row')}, {plural(plan.heads, 'head')}", "counted"),
            Number("ledger", ledger, "counted"),
            Number("error", f"{self.error:.2e} (out), {self.lse_error:.2e} (lse), at most {self.tolerance:.2e} allowed",
                   "measured"),
        ]  # fmt: skip
        if self.gradient_error is not None:
            where = f"dq of {plural(self.rows, 'query row')}, dk and dv of {plural(self.keys, 'key row')}"
            if self.dense:
                where += f", all rows of {plural(self.dense, 'rank')}"
            found.append(Number("gradients", f"{self.gradient_error:.2e} ({where})", "measured"))
        if self.sum_error is not None:
            found.append(
                Number("gradient sums", f"{self.sum_error:.2e} (dq, dk, dv over all executed rows)", "measured")
            )
        if self.wrong_gradients is not None:
            found.append(
                Number(
                    "gradient ledger",
                    f"{self.wrong_gradients:,} {'rows or blocks' if self.mode == 'sample' else 'rows'} differ",
                    "counted",
                )
            )
        if self.answered:
            found.append(
                Number("from the source", f"{self.answered:,} messages of ranks that were not executed", "counted")
            )
        live = f"{plural(self.live, 'shard')} of K/V" if self.mode == "sample" else plural(self.live, "rank")
        return [
            *found,
            Number("at a time", f"{live} at most", "counted"),
            Number("time", duration(self.seconds), "measured"),
        ]
