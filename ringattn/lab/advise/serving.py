"""`serve`: how many GPUs a prefill or a decode needs, and how to spread a model over them, from modelled times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, gcd
from typing import Any

from ...errors import InvalidInput, RingAttentionError
from ...machine.machine import Machine
from ...machine.presets import CURRENCY
from ...simulator.progress import Listener
from ...simulator.timing.costs import SECONDS_PER_HOUR
from ...text import digits, duration, plural, size
from ..models.inference import decode, prefill
from ..models.layer import ModelEstimate
from ..models.parallel import Parallel
from .engines import ENGINES, command, starts
from .search import LARGE, Offer, Question, divisors

#: A factor on the sequences, and on their tokens, that is tried for the chosen spread.
MORE = 4
#: The number of chunks of a prompt that does not fit as a whole.
CHUNKS = 32
#: Times that differ by less than this fraction are equal: fewer bytes win.
EQUAL = 0.01


@dataclass(frozen=True)
class Serving:
    """The answer of `serve`: for each number of GPUs the fastest way that fits, or else the one nearest to fitting."""

    question: Question
    offer: Offer
    best: dict[int, ModelEstimate]
    misses: dict[int, ModelEstimate]
    #: The fastest that fits, and that servers start.
    plain: dict[int, ModelEstimate]

    @property
    def chosen(self) -> int | None:
        """The smallest number of GPUs that meets `within`, or without `within` the fastest; None if none does."""
        within, best = self.question.within, self.best
        if within is None:
            return min(best, key=lambda gpus: (best[gpus].seconds, gpus), default=None)
        return next((gpus for gpus, one in best.items() if one.seconds <= within), None)

    @property
    def waits_for(self) -> str:
        """What the limit `within` applies to, in words."""
        return "first token" if self.question.phase == "prefill" else "next token of every sequence"

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        question, gpus = self.question, self.chosen
        what = (
            f"{question.phase} of {question.model.name}, {plural(question.batch or 1, 'sequence')} of "
            f"{question.tokens:,} tokens on {self.offer.name}"
        )
        limit = "" if question.within is None else f" within {duration(question.within)}"
        if not self.best:
            miss = self.describe_miss(question.gpus)
            return f"{what}: fits on no number of GPUs up to {question.gpus}; {miss} [modelled]."
        if gpus is None:
            count, one = min(self.best.items(), key=lambda found: found[1].seconds)
            assert question.within is not None, "without a limit the fastest is chosen"
            return (
                f"{what}: no number of GPUs up to {question.gpus} gives the {self.waits_for}{limit}; at best it "
                f"takes {duration(one.seconds)}, {one.seconds / question.within:.3g} times the limit, on "
                f"{plural(count, 'GPU')} with {name_spread(one)} [modelled]."
            )
        one, costs = self.best[gpus], self.describe_costs(gpus)
        return (
            f"{what}: {plural(gpus, 'GPU')}{' are the fewest' if limit else ' are the fastest'} that give the "
            f"{self.waits_for}{limit}: {name_spread(one)}, {duration(one.seconds)}, {size(one.bytes)} of each GPU"
            f"{f', {costs} for 1e6 tokens' if costs else ''} [modelled]."
        )

    @property
    def changes(self) -> list[str]:
        """What the chosen spread would take with 8 bits, more sequences or longer ones, a sentence each."""
        if self.chosen is None:
            return []
        question, one, machine = self.question, self.best[self.chosen].parallel, self.offer.machine
        software, users, tokens = one.software, MORE * one.rows, MORE * question.tokens
        asked = {f"{users * one.dp:,} sequences": replace(one, rows=users), f"{tokens:,} tokens": one}
        if not software.fp8_cache:
            asked["fp8_cache=true"] = replace(one, software=replace(software, fp8_cache=True))
        if not software.fp8 and machine.matmul_fp8 is not None:
            asked["fp8=true"] = replace(one, software=replace(software, fp8=True))
        lines = list[str]()
        for name, parallel in asked.items():
            longer = replace(question, tokens=tokens) if parallel is one else question
            try:
                found = estimate(longer, machine, parallel)
            except RingAttentionError as error:
                lines.append(f"With {name} there is no answer: {error}")
                continue
            fits = "" if found.fits is not False else f", but a GPU needs {found.lacks}"
            lines.append(f"With {name} it takes {duration(found.seconds)} and {size(found.bytes)}{fits}.")
        return lines

    def costs(self, gpus: int) -> dict[str, float]:
        """Price and energy of 1e6 tokens on this number of GPUs by unit, as far as the machine has them."""
        hours, watts = 1e6 / self.best[gpus].tokens_per_second / SECONDS_PER_HOUR, self.offer.machine.watts
        rates = {CURRENCY: self.offer.price, "kWh": None if watts is None else watts / 1000}
        return {unit: hours * rate for unit, rate in rates.items() if rate is not None}

    def describe_costs(self, gpus: int) -> str:
        """The same as text."""
        return " and ".join(f"{digits(value)} {unit}" for unit, value in self.costs(gpus).items())

    def describe_miss(self, gpus: int) -> str:
        """How much memory is lacking on this number of GPUs, and what takes most of it, in words."""
        return f"on {plural(gpus, 'GPU')} {name_spread(self.misses[gpus])} needs {self.misses[gpus].lacks}"

    @property
    def launches(self) -> list[tuple[str, str]]:
        """(what it serves how fast, its command or "") of each engine; [] if nothing is chosen.

        They have no `cp`, and a server is on one host here: it is the fastest such spread.
        """
        question, gpus = self.question, self.chosen
        one = next((self.plain[count] for count in sorted(self.plain, reverse=True) if count <= (gpus or 0)), None)
        if gpus is None or one is None:
            return [(f"{engine.name}: no server without cp on one host fits", "") for engine in ENGINES if gpus]
        split = max(self.best[gpus].parallel.cp, one.parallel.tp // question.model.kv_heads) > 1
        each = f", by this command for each of {one.parallel.dp} groups" if one.parallel.dp > one.parallel.ep else ""
        within, found = question.within or one.seconds, list[tuple[str, str]]()
        late = f", {one.seconds / within:.3g} times the limit" if one.seconds > within else ""
        words = f"{name_spread(one)}: {duration(one.seconds)} [modelled]{late}{each}"
        for engine in ENGINES:
            line = command(engine, question.model, question.tokens, one.parallel)
            said = words if line else "no option for these products in 8 bits"
            found.append((f"{engine.name}: {said}{f'. It splits {engine.splits}' if split else ''}", line))
        return found

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Table rows, one for each number of GPUs: parallelism, seconds, rate and memory; no time if nothing fits."""
        rows = list[tuple[str, ...]]()
        for gpus in self.question.counts:
            if one := self.best.get(gpus):
                seconds, parts = one.seconds, one.parts
                longest = max(parts, key=lambda name: parts[name])
                share = f"{longest} {parts[longest] / seconds:.0%}"
                rate = f"{digits(one.tokens / seconds)} tokens/s"
                line = (str(gpus), name_spread(one), duration(seconds), rate, share, size(one.bytes))
                rows.append((*line, self.describe_costs(gpus)))
            elif one := self.misses.get(gpus):
                rows.append((str(gpus), one.parallel.name, "does not fit", "", "", size(one.bytes), ""))
        return rows

    @property
    def record(self) -> dict[str, Any]:
        """The answer as plain data: seconds and bytes."""
        question = self.question
        names = ("phase", "tokens", "gpus", "batch", "within")
        return {
            "question": {
                "model": question.model.name,
                "machine": self.offer.name,
                **{name: getattr(question, name) for name in names},
                **{name: getattr(question.software, name) for name in ("dtype", "fp8", "fp8_blocks", "fp8_cache")},
            },
            "verdict": self.verdict,
            "chosen": self.chosen,
            "changes": self.changes,
            "best": {
                str(gpus): {
                    **{name: getattr(one.parallel, name) for name in ("cp", "dp", "tp", "ep")},
                    **{name: getattr(one, name) for name in ("seconds", "parts", "memory", "plan")},
                    "cost of 1e6 tokens": self.costs(gpus),
                }
                for gpus, one in self.best.items()
            },
            "launch": [line for _, line in self.launches if line],
            "does not fit": {str(gpus): self.describe_miss(gpus) for gpus in self.misses},
            "kind": "modelled",
        }


def serve(question: Question, offer: Offer, tell: Listener = lambda done, count, what: None) -> Serving:
    """Find the best way to serve on each number of GPUs.

    Raises InvalidInput if nothing fits, and no way to split all GPUs into cp x dp x tp can be simulated.
    """
    best: dict[int, ModelEstimate] = {}
    misses: dict[int, ModelEstimate] = {}
    plain: dict[int, ModelEstimate] = {}
    refused = set[str]()
    for done, gpus in enumerate(question.counts):
        tell(done, len(question.counts), plural(gpus, "GPU"))
        found = []
        for parallel in list_spreads(question, offer.machine, gpus):
            try:
                found.append(estimate(question, offer.machine, parallel))
            except RingAttentionError as error:
                refused.add(str(error))
        fitting = [one for one in found if one.fits is not False]
        if fitting:
            least = min(one.seconds for one in fitting)
            best[gpus] = min((x for x in fitting if x.seconds <= least * (1 + EQUAL)), key=lambda x: x.bytes)
            if whole := [x for x in fitting if starts(offer.machine, x.parallel)]:
                plain[gpus] = min(whole, key=lambda x: (x is not best[gpus], x.seconds))
        elif found:
            misses[gpus] = min(found, key=lambda one: one.bytes)
    if not best and question.gpus not in misses:
        why = f": {min(refused)}" if refused else ""
        raise InvalidInput(
            f"no cp x dp x tp of {question.gpus} GPUs serves {question.model.name}{why}; try another number of GPUs"
        )
    return Serving(question, offer, best, misses, plain)


def estimate(question: Question, machine: Machine, parallel: Parallel) -> ModelEstimate:
    """The prefill or decode of a spread; without cp, a prompt that does not fit as a whole comes in CHUNKS."""
    if question.phase == "decode":
        return decode(question.model, machine, question.tokens, parallel)
    one = prefill(question.model, machine, question.tokens, parallel)
    if one.fits is not False or parallel.cp > 1:
        return one
    return prefill(question.model, machine, question.tokens, parallel, chunk=ceil(question.tokens / CHUNKS))


def name_spread(one: ModelEstimate) -> str:
    """The spread of an estimate, and whether prompts come in chunks, as text."""
    return one.parallel.name + (f" in {CHUNKS} chunks" if f"{CHUNKS} chunks" in one.plan else "")


def list_spreads(question: Question, machine: Machine, gpus: int) -> Iterator[Parallel]:
    """Every way to split `gpus` GPUs into cp x dp x tp, with equally many sequences in each of the dp groups.

    tp stays within a node; with fewer key/value heads than tp, ranks hold copies of a head. Experts are whole in each
    dp group, or shared by as many ranks as divide them: in a decode by those of different sequences.
    """
    model, users = question.model, question.batch or 1
    for tp in divisors(gpus):
        if tp > machine.ranks_per_node or (model.kv_heads % tp and tp % model.kv_heads):  # ranks may share a head
            continue
        for cp in divisors(gpus // tp):
            dp = gpus // (tp * cp)
            if users % dp or cp > question.tokens:
                continue
            schedule = "auto" if cp <= LARGE else "ring"
            shared = gcd(model.experts - model.shared, dp if question.phase == "decode" else cp * dp)
            for ep in sorted({1, shared}):
                options: dict[str, Any] = {"schedule": schedule, "software": question.software}
                yield Parallel(cp, dp, tp, ep, rows=users // dp, **options)
