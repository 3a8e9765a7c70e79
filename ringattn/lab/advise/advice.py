"""`advise`: the best ways to train a model on a cluster, the reasons, how sure they are, and what would change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import log
from typing import Any

from ...errors import InvalidInput, RingAttentionError
from ...machine.bands import describe_steps, step_band
from ...machine.machine import MACHINE_NUMBERS
from ...machine.presets import CURRENCY, PRESETS, get_machine
from ...simulator.progress import Listener
from ...simulator.timing.costs import SECONDS_PER_HOUR
from ...text import command_lines, did_you_mean, digits, duration, plural, rate, size
from ..models.packing import Lognormal
from ..models.parallel import CHECKPOINTING
from ..models.training import ATTENTION_PARTS, StepEstimate
from . import torchtitan
from .search import (
    EQUAL,
    LAYOUTS,
    SHOWN,
    Found,
    Offer,
    Question,
    TrainingCandidate,
    least_attention_of_layers,
    list_spreads,
    search,
)

#: Sort orders of candidates: time or cost per token.
ORDERS = ("time", "cost")
#: Factors on the bandwidth between nodes, and on the tokens, that are tried for the best candidates.
BANDWIDTHS, LENGTHS = (0.125, 0.5, 1.0, 2.0), (0.25, 4.0)
#: A factor on the sequences of a step that is tried for the best candidate.
MORE = 4
#: Limit of the search for the longest sequence that fits.
MOST_TOKENS = 1 << 30
#: Parts of a step that are traffic outside attention.
TRAFFIC = ("tp", "ep", "fsdp", "pp", "host")
#: The smallest share of time saved for which the advice recommends more memory.
WORTH = 0.03


@dataclass(frozen=True)
class Advice:
    """The answer of `advise` to a question, with the reasons for it as text.

    `found` has the candidates by (machine, number of GPUs).
    """

    question: Question
    by: str
    found: dict[tuple[str, int], Found]
    #: The best candidates of different shapes, best first; at most SHOWN.
    best: list[TrainingCandidate]
    #: Each of `best` at each of BANDWIDTHS; empty if the first one runs on a single node.
    bandwidths: list[list[TrainingCandidate]]
    #: The best candidate at each of LENGTHS times the tokens; None if nothing fits.
    lengths: list[TrainingCandidate | None]
    #: The step of the best candidate with MORE times the sequences; None if their number was given.
    batched: StepEstimate | None
    #: The step of the best candidate with each other layout, where documents are packed over cp ranks.
    layouts: dict[str, StepEstimate]
    #: Seconds of the best candidate's step with each other library of attention kernels.
    libraries: dict[str, float]
    #: The step that `launch` starts, as torchtitan makes it; None if it has no such model, or refuses to.
    launched: StepEstimate | None

    @cached_property
    def all(self) -> list[TrainingCandidate]:
        """The candidates of all machines and numbers of GPUs: the best one of each shape (cp, dp, tp, pp, ep)."""
        return [candidate for found in self.found.values() for candidate in found.best]

    @cached_property
    def pareto(self) -> list[TrainingCandidate]:
        """The candidates that no other beats in both time and cost, fastest first."""
        front: list[TrainingCandidate] = []
        for candidate in sorted(self.all, key=lambda one: (one.seconds, one.cost)):
            if not front or candidate.cost < front[-1].cost * (1 - EQUAL):
                front.append(candidate)
        return front

    @property
    def counts(self) -> str:
        """How many candidates there were, and how many ended in each way (simulated, too large, ...), as text."""
        counts = sum((found.counts for found in self.found.values()), Counter[str]())
        return f"{plural(counts.total(), 'candidate')}: {', '.join(f'{n:,} {name}' for name, n in counts.items())}"

    @property
    def unit(self) -> str:
        """The unit of cost."""
        return "GPU hours" if self.best[0].offer.price is None else CURRENCY

    @property
    def verdict(self) -> str:
        """The best candidate, and at which bandwidth another would be better, in one sentence."""
        best, step, model = self.best[0], self.best[0].step, self.question.model
        mfu = "" if step.mfu is None else f", {step.mfu:.0%} of the peak"
        host = f", {size(step.host_bytes)} of each GPU in the memory of its host" if step.host_bytes else ""
        return (
            f"{self.words[1].title()} for {model.name} on sequences of {self.question.tokens:,} tokens"
            f"{f' ({step.packed})' if step.packed else ''}: {describe_place(best)}, {best.name}, {best.choices}"
            f"{f', attention by {best.library}' if best.library else ''}{host}; a step of "
            f"{plural(best.parallel.rows * best.parallel.dp, 'sequence')} takes {duration(step.seconds)}{mfu}, and 1e9 "
            f"tokens take {duration(best.seconds)} and {digits(best.cost)} {self.unit} [modelled]"
            f"{self._bandwidth_change()}."
        )

    @property
    def changes(self) -> list[str]:
        """Which other kernel, batch, number of tokens, memory or price would change the verdict, a sentence each."""
        length = [*self._batch_change(), *self._length_changes()]
        layouts = [
            f"Layout: with {name} a step takes {duration(step.seconds)}, as {step.unequal}."
            for name, step in self.layouts.items()
            if step.seconds > self.best[0].step.seconds * (1 + EQUAL)
        ]
        return [*self._kernel_change(), *layouts, *length, self._memory_change(), *self._price_changes()]

    def _kernel_change(self) -> list[str]:
        """The times with other libraries; empty if there are none."""
        best = self.best[0]
        if not self.libraries:
            return []
        others = ", ".join(f"{duration(seconds)} with {name}" for name, seconds in self.libraries.items())
        why = ", which torch's attention takes first on this GPU" if best.library == torch_library(best.offer) else ""
        return [f"Kernel: with {best.library}{why}, a step takes {duration(best.step.seconds)}; {others}."]

    def _batch_change(self) -> list[str]:
        """The time with more sequences in a step; empty if the batch was given."""
        step = self.batched
        if step is None:
            return []
        seconds = f"1e9 tokens take {duration(1e9 / step.tokens * step.seconds)}"
        taken = f"a GPU needs {size(step.bytes)}" if step.fits is False else seconds
        return [f"Batch: with {MORE} times the sequences in a step, one after another, {taken}."]

    def _length_changes(self) -> Iterator[str]:
        """The best candidate at each of LENGTHS."""
        best, most = self.best[0], self.words[1]
        for factor, one in zip(LENGTHS, self.lengths, strict=True):
            found = f"nothing fits on {describe_place(best)}"
            if one is not None:
                is_same = (one.name, one.choices) == (best.name, best.choices)
                found = f"this candidate stays the {most}" if is_same else f"the {most} is {one.name}, {one.choices}"
            yield f"Tokens: at {self.question.resized(factor).tokens:,} {found}."

    def _memory_change(self) -> str:
        """What more memory would allow."""
        best = self.best[0]
        too_large = self.found[best.offer.name, best.step.gpus].too_large
        faster = [one for one in too_large if one.seconds < best.seconds * (1 - WORTH)]
        if not faster:
            return f"Memory: more would not help; nothing that does not fit could take {WORTH:.0%} less time."
        one = min(faster, key=lambda one: one.step.bytes)
        return (
            f"Memory: with {size(one.step.bytes)} on each GPU, {one.name}, {one.choices}, could fit, and take up to "
            f"{1 - one.seconds / best.seconds:.0%} less time."
        )

    def _price_changes(self) -> Iterator[str]:
        """What a second costs, and the price at which each other machine would be the cheapest."""
        best = self.best[0]
        if best.offer.price is not None:
            second, machine = best.step.gpus * best.offer.price / SECONDS_PER_HOUR, best.offer.machine
            own = best.offer.price == machine.price and machine.source("price") == "assumed"
            costs = {name: share * best.cost for name, share in shares(best).items() if share >= WORTH}
            parts = ", ".join(f"{name} for {digits(cost)}" for name, cost in costs.items())
            yield (
                f"Price: at {digits(best.offer.price)} {CURRENCY} for an hour of a GPU{' [assumed]' * own}, a second "
                f"on all GPUs costs {digits(second)}, and a step {digits(second * best.step.seconds)} {CURRENCY}; of "
                f"{digits(best.cost)} {CURRENCY} for 1e9 tokens, {parts}."
            )
        by_offer = {one.offer.name: one for one in sorted(self.all, key=lambda one: one.cost, reverse=True)}
        first, *dearer = sorted(by_offer.values(), key=lambda one: one.cost)
        for other in dearer:
            assert first.offer.price is not None and other.offer.price is not None
            price = other.offer.price * first.cost / other.cost if other.cost else 0.0
            yield (
                f"Price: {first.offer.name} is cheapest at {digits(first.offer.price)} {CURRENCY}; below "
                f"{digits(price)} instead of {digits(other.offer.price)} {CURRENCY}, {other.offer.name} is cheaper."
            )

    def value(self, candidate: TrainingCandidate) -> float:
        """The number by which candidates are ordered: seconds, or cost, of 1e9 tokens."""
        return candidate.seconds if self.by == "time" else candidate.cost

    @property
    def words(self) -> tuple[str, str]:
        """The words for a better candidate: ("faster", "fastest") or ("cheaper", "cheapest")."""
        return ("faster", "fastest") if self.by == "time" else ("cheaper", "cheapest")

    def _bandwidth_change(self) -> str:
        """The end of the verdict; "" if no bandwidths were compared."""
        if not self.bandwidths:
            return ""
        now = self.best[0].offer.machine.bandwidth
        for place in sorted(range(len(BANDWIDTHS)), key=lambda i: abs(log(BANDWIDTHS[i]))):
            values = [self.value(line[place]) for line in self.bandwidths]
            if min(values) < values[0] * (1 - EQUAL):
                winner, changed = self.best[values.index(min(values))], rate(now * BANDWIDTHS[place], "B/s")
                return f"; at {changed} instead of {rate(now, 'B/s')} between nodes, {winner.name} is {self.words[0]}"
        low, high = (rate(now * factor, "B/s") for factor in (BANDWIDTHS[0], BANDWIDTHS[-1]))
        return f"; at {low} to {high} between nodes, none of the other candidates shown becomes {self.words[0]}"

    @property
    def doubts(self) -> list[str]:
        """Reasons why the order may be wrong, one sentence each."""
        best, lines = self.best[0], []
        low, high = span(best)
        if low < high:
            lines.append(
                f"{describe_steps(best.step.outside)}: here 1e9 tokens take {duration(low)} to {duration(high)}."
            )
            most = step_band(best.step.outside)[1] * self.value(best)
            equal = [f"{place}. {one.name}" for place, one in enumerate(self.best, 1) if self.value(one) <= most][1:]
            if equal:
                lines.append(f"Within this band of the first, so not distinguishable from it: {', '.join(equal)}.")
        else:
            lines.append("The machine is not a preset, so nothing tells how sure the order is.")
        memory = best.offer.machine.memory
        if memory is not None and best.is_tight:
            lines.append(
                f"Every candidate fits tightly: the first needs {size(best.step.bytes)} of {size(memory)}, and "
                f"an allocator could take {size(best.step.reserved)}: if it runs out, take more GPUs, or "
                "checkpointing=host."
            )
        return lines

    @property
    def launched_words(self) -> str:
        """A sentence on how the step that the command `launch` runs differs from the recommended one."""
        if self.launched is None:
            best = self.best[0]
            _, why = torchtitan.configuration(self.question.model, best.offer.machine, best.parallel)
            return f"{why}: train with ringattn.train."
        has = self.best[0].offer.machine.memory
        room = "" if has is None else f" of {size(has)}"
        words = (
            f"torchtitan {torchtitan.RELEASE} attends by {torchtitan.attends(self.question.model)}, gathers all keys "
            "at once, keeps fp32 weights, "
            f"and computes logits in {torchtitan.CHUNKS} parts: there a step takes {duration(self.launched.seconds)} "
            f"and {size(self.launched.needed)}{room} [modelled]"
        )
        if self.launched.fits is not False:
            return f"{words}."
        return f"{words}, which does not fit: train with ringattn.train, whose loss holds the logits of 512 tokens."

    @property
    def launch(self) -> str:
        """The command that launches the best candidate in torchtitan; "" where that cannot run it."""
        if self.launched is None or self.launched.fits is False:
            return ""
        best = self.best[0]
        return torchtitan.command(self.question.model, best.offer.machine, self.question.tokens, best.parallel)

    @property
    def launch_lines(self) -> str:
        """`launch` in lines of a terminal."""
        return command_lines(self.launch)

    @property
    def not_fitting(self) -> list[str]:
        """For each machine, the candidate that comes closest to fitting, and on how many GPUs nothing fits, as text."""
        misses = {one.name: nearest_miss(self.found[one.name, self.question.gpus]) for one in self.question.offers}
        return [f"{name}: {words}" for name, words in misses.items() if words] + [
            f"{offer.name}: nothing fits on {' or '.join(map(str, none[::-1]))} GPU{'s' * (none != [1])}"
            for offer in self.question.offers
            if (none := [gpus for gpus in self.question.counts if not self.found[offer.name, gpus].best])
        ]

    @property
    def refused(self) -> list[str]:
        """How many candidates could not be planned or simulated, by reason, as text."""
        reasons = sum((found.refused for found in self.found.values()), Counter[str]())
        return [f"{plural(count, 'candidate')}: {reason}" for reason, count in reasons.items()]

    @cached_property
    def frontier(self) -> dict[str, list[tuple[int, int]]]:
        """For each kind of checkpointing, pairs (GPUs, most tokens of one sequence that fit), on the best machine."""
        question, offer, counts = self.question, self.best[0].offer, self.question.counts
        return {
            name: [(gpus, most) for gpus in counts if (most := _most_tokens(question, offer, gpus, name))]
            for name in CHECKPOINTING
        }


def torch_library(offer: Offer) -> str | None:
    """The attention library that torch uses on a machine; None for a machine without kernel data.

    It is cuDNN, which torchtitan's scaled_dot_product_attention takes first on every GPU, or else flash-attn 2 ("fa2"),
    which torch contains, or the first library of the machine's preset.
    """
    names = [*PRESETS[offer.machine.preset].kernels] if offer.machine.preset else []
    return next((name for name in ("cudnn", "fa2", *names) if name in names), None)


def describe_place(candidate: TrainingCandidate) -> str:
    """The GPUs of a candidate, as text."""
    return f"{plural(candidate.step.gpus, 'GPU')} of {candidate.offer.name}"


def span(candidate: TrainingCandidate) -> tuple[float, float]:
    """(least, most) seconds that 1e9 tokens take, given the errors of this model for published training steps.

    If the machine has no known errors, both are the modelled time.
    """
    step, per_token = candidate.step, 1e9 / candidate.step.tokens
    low, high = step.seconds_band or (step.seconds, step.seconds)
    return per_token * low, per_token * high


def shares(candidate: TrainingCandidate) -> dict[str, float]:
    """The shares of a step by what takes the time, largest first."""
    parts, seconds = candidate.step.parts, candidate.step.seconds
    attention = sum(parts[name] for name in ATTENTION_PARTS)
    traffic, bubble = sum(parts[name] for name in TRAFFIC), parts["bubble"]
    optimiser = "optimiser on the host" if candidate.parallel.trains_on_host else "optimiser"
    least = min(candidate.least_attention, attention)
    found = {
        "attention computes": least,
        "attention waits, merges and starts": attention - least,
        "products and norms": seconds - attention - traffic - bubble - parts["optimiser"],
        optimiser: parts["optimiser"],
        f"exposed traffic of {', '.join(TRAFFIC)}": traffic,
        "bubble of the pipeline": bubble,
    }
    return {name: part / seconds for name, part in sorted(found.items(), key=lambda one: -one[1])}


def explain(candidate: TrainingCandidate) -> str:
    """What limits the speed of a candidate, as text: the shares of the time of its step, and its memory."""
    (largest, most), *others = shares(candidate).items()
    words = f"{candidate.step.unequal}; " if candidate.step.unequal else ""
    words += f"bound by: {largest} {most:.1%} of the step; "
    words += ", ".join(f"{name} {share:.1%}" for name, share in others if share >= 0.001)
    memory = candidate.offer.machine.memory
    if memory is None:
        return words
    category = max(candidate.step.memory, key=lambda name: candidate.step.memory[name])
    nearly = "memory tight" if candidate.is_tight else "memory"
    return f"{words}; {nearly}: {size(candidate.step.bytes)} of {size(memory)}, most of it {category}"


def nearest_miss(found: Found) -> str:
    """The candidate that exceeds the memory of a GPU least, as text; "" if none was too large."""
    one = min(found.too_large, key=lambda one: one.step.bytes, default=None)
    if one is None:
        return ""
    schedule = f", schedule={one.parallel.schedule}" if one.parallel.cp > 1 else ""
    return f"the nearest miss is {one.name}, {one.choices}{schedule}: {one.step.lacks}"


def describe_numbers(advice: Advice) -> list[str]:
    """One line for each machine number on which the predicted steps depend, with its source."""
    machines = {one.offer.name: one.offer.machine for one in advice.best}
    return [
        f"{where}: {name} {number.show(getattr(machine, name))}, {machine.source(name)}"
        for where, machine in machines.items()
        for name, number in MACHINE_NUMBERS.items()
        if number.python_type is float
        and getattr(machine, name) is not None
        and not (name == "flops" and machine.kernel_rates is not None)
    ] + [
        f"{where}: attention by {rates.library}, {rate(rates.forward, 'FLOP/s')} forward, "
        f"{rate(rates.backward, 'FLOP/s')} backward, with their exponentials, {machine.source('kernel_rates')}"
        for where, machine in machines.items()
        if (rates := machine.kernel_rates) is not None
    ]


def _most_tokens(question: Question, offer: Offer, gpus: int, checkpointing: str) -> int:
    """The most tokens of one sequence that fit, in powers of two, by counted bytes; 0 if none do."""
    asked = (replace(question, tokens=1 << i, batch=1, documents=()) for i in range(10, MOST_TOKENS.bit_length()))
    fitting = takewhile(lambda one: _any_fits(one, offer, gpus, checkpointing), asked)
    return max((one.tokens for one in fitting), default=0)


def _any_fits(question: Question, offer: Offer, gpus: int, checkpointing: str) -> bool:
    for parallel in list_spreads(question, offer.machine, gpus):
        if parallel.checkpointing == checkpointing and parallel.shard in ("weights", "none"):
            with suppress(RingAttentionError):  # a search names what it refuses
                if question.step(offer.machine, parallel, least_attention_of_layers).fits is not False:
                    return True
    return False


def advise(question: Question, by: str = "time", tell: Listener = lambda done, count, what: None) -> Advice:
    """Find the best ways to train, as a question asks.

    `by` is one of ORDERS, such as "time"; `tell` is a progress callback. Raises InvalidInput if no candidate fits, or
    if machines are to be compared and one has no price.
    """
    if by not in ORDERS:
        raise InvalidInput(f"by={by}: {did_you_mean(by, ORDERS)}expected one of {', '.join(ORDERS)}")
    if len(question.offers) > 1 and any(offer.price is None for offer in question.offers):
        raise InvalidInput("prices: comparing several machines needs a price an hour for each; give them")
    found = {}
    tasks = [(offer, gpus) for offer in question.offers for gpus in question.counts]
    for done, (offer, gpus) in enumerate(tasks):
        tell(done, len(tasks) + 2, f"{plural(gpus, 'GPU')} of {offer.name}")
        found[offer.name, gpus] = search(question, offer, gpus, SHOWN if gpus == question.gpus else 1)
    best = _choose(found, by)
    if not best:
        raise _nothing_fits(question, found)
    tell(len(tasks), len(tasks) + 2, "other bandwidths")
    far = best[0].step.gpus > best[0].offer.machine.ranks_per_node
    bandwidths = []
    for one in best if far else ():
        machines = (replace(one.offer.machine, bandwidth=x * one.offer.machine.bandwidth) for x in BANDWIDTHS)
        bandwidths.append([replace(one, step=question.step(machine, one.parallel)) for machine in machines])
    tell(len(tasks) + 1, len(tasks) + 2, "other lengths")
    others = (question.resized(factor) for factor in LENGTHS)
    lengths = [next(iter(search(other, best[0].offer, best[0].step.gpus, 1).best), None) for other in others]
    machine, libraries = best[0].offer.machine, dict[str, float]()
    packed = best[0].parallel.documents and best[0].parallel.cp > 1
    layouts = {
        name: question.step(machine, replace(best[0].parallel, layout=name))
        for name in ((*LAYOUTS, "balanced") if packed else ())
        if name != best[0].parallel.layout
    }
    first = best[0].parallel
    several = replace(first, rows=MORE * first.rows, micro_batches=MORE * first.count)
    batched = question.step(machine, several) if question.batch is None else None
    for name in PRESETS[machine.preset].kernels if machine.preset else ():
        if name != best[0].library:
            rates = get_machine(f"{machine.preset}/{name}").kernel_rates
            libraries[name] = question.step(replace(machine, kernel_rates=rates), best[0].parallel).seconds
    launched = None
    if torchtitan.configuration(question.model, machine, best[0].parallel)[0]:
        # FlexAttention is a Triton kernel.
        flex = "triton" if "triton" in libraries and torchtitan.attends(question.model) == "FlexAttention" else None
        rates = get_machine(f"{machine.preset}/{flex}").kernel_rates if flex else machine.kernel_rates
        same = torchtitan.as_torchtitan(question.tokens, best[0].parallel)
        launched = question.step(replace(machine, kernel_rates=rates), same)
    return Advice(question, by, found, best, bandwidths, lengths, batched, layouts, libraries, launched)


def _choose(found: dict[tuple[str, int], Found], by: str) -> list[TrainingCandidate]:
    """The best candidates of all; of equal ones, that with fewer bytes comes first."""

    def key(candidate: TrainingCandidate) -> tuple[bool, int, int, int]:
        value = candidate.seconds if by == "time" else candidate.cost
        return candidate.is_tight, round(log(value) / EQUAL) if value else 0, candidate.pace, candidate.step.bytes

    return sorted((candidate for one in found.values() for candidate in one.best), key=key)[:SHOWN]


def _nothing_fits(question: Question, found: dict[tuple[str, int], Found]) -> InvalidInput:
    """Why nothing fits: the nearest miss, and how many GPUs would be enough."""
    reasons = [reason for one in found.values() for reason in one.refused]
    for offer in question.offers:
        if words := nearest_miss(found[offer.name, question.gpus]):
            more = (factor * question.gpus for factor in (2, 4, 8, 16))
            fitting = next((n for n in more if any(_any_fits(question, offer, n, x) for x in CHECKPOINTING)), None)
            reasons.append(f"{offer.name}: {words}{f'; {fitting} GPUs would be enough' if fitting else ''}")
    why = "; ".join(reasons[:3]) or "no cp x dp x tp x pp has this number of GPUs and this batch"
    return InvalidInput(
        f"{question.model.name} with {question.tokens:,} tokens does not fit on up to {plural(question.gpus, 'GPU')}: "
        f"{why}; try more GPUs, fewer tokens, or machines with more memory"
    )


def record(advice: Advice) -> dict[str, Any]:
    """The advice as plain data: seconds, bytes, and costs of 1e9 tokens."""
    question = advice.question
    return {
        "question": {
            "model": question.model.name,
            **{name: getattr(question, name) for name in ("tokens", "gpus", "batch")},
            "documents": question.documents.name if isinstance(question.documents, Lognormal) else question.documents,
            **{name: getattr(question.software, name) for name in ("dtype", "fp8", "fp8_blocks", "lora")},
            "by": advice.by,
            "machines": {offer.name: offer.price for offer in question.offers},
        },
        "verdict": advice.verdict,
        "libraries": advice.libraries,
        "changes": advice.changes,
        "best": [_record(candidate) for candidate in advice.best],
        "pareto": [_record(candidate) for candidate in advice.pareto],
        "does not fit": advice.not_fitting,
        "how sure": advice.doubts,
        "launch": advice.launch,
        "launched": advice.launched
        and {"seconds": advice.launched.seconds, "bytes": advice.launched.needed, "fits": advice.launched.fits},
        "numbers": describe_numbers(advice),
        "counts": {f"{name}, {gpus} GPUs": dict(found.counts) for (name, gpus), found in advice.found.items()},
        "refused": advice.refused,
        "bandwidth": [
            {"factor": factor, "seconds": [line[place].seconds for line in advice.bandwidths]}
            for place, factor in enumerate(BANDWIDTHS)
            if advice.bandwidths
        ],
        "frontier": advice.frontier,
    }


def _record(candidate: TrainingCandidate) -> dict[str, Any]:
    parallel, step = candidate.parallel, candidate.step
    low, high = span(candidate)
    return {
        "machine": candidate.offer.name,
        "gpus": step.gpus,
        **{name: getattr(parallel, name) for name in ("cp", "dp", "tp", "ep", "pp", "interleaved")},
        **{name: getattr(parallel, name) for name in ("layout", "schedule", "checkpointing")},
        "sharding": parallel.shard,
        "batch": parallel.rows * parallel.dp,
        **{name: getattr(step, name) for name in ("plan", "mfu", "tflops", "parts", "memory", "imbalance")},
        "step seconds": step.seconds,
        "seconds of 1e9 tokens": candidate.seconds,
        "seconds of 1e9 tokens, band": [low, high],
        "cost of 1e9 tokens": None if candidate.offer.price is None else candidate.cost,
        "tokens per second and GPU": step.tokens_per_second,
        "why": explain(candidate),
    }


def tabulate(candidates: Sequence[TrainingCandidate]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of candidates."""
    header = ["candidate", "1e9 tokens", "step", "cost of 1e9", "MFU", "memory"]
    rows = [
        [
            f"{place}. {candidate.offer.name} x {candidate.step.gpus}: {candidate.name}",
            duration(candidate.seconds),
            duration(candidate.step.seconds),
            f"{digits(candidate.cost)} {'GPU h' if candidate.offer.price is None else CURRENCY}",
            "" if candidate.step.mfu is None else f"{candidate.step.mfu:.1%}",
            size(candidate.step.bytes),
        ]
        for place, candidate in enumerate(candidates, 1)
    ]
    return header, rows
