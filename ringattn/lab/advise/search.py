"""The search: every way to spread a model over GPUs, pruned by bytes and bounds on time; the rest is simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, gcd, log
from typing import Any

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput, RingAttentionError
from ...machine.kernel_times import BACKWARD, BLOCK
from ...machine.machine import Machine
from ..models.attention import LayerAttention, attention_of_layers, count_pairs
from ..models.config import ModelConfig
from ..models.packing import Lognormal
from ..models.parallel import CHECKPOINTING, Parallel, Software
from ..models.training import ATTENTION_PARTS, Attend, StepEstimate, training_step

#: Layouts to compare; without windows only the first, as contiguous shards load ranks unequally.
LAYOUTS = ("zigzag", "contiguous")
#: Up to this many context-parallel ranks every schedule is simulated; beyond, only the one that `auto` chooses.
SMALL = 16
#: Beyond this many ranks `auto` takes too long: the schedule is a ring.
LARGE = 64
#: The SHARDS to compare: sharding only optimizer states takes as long as with gradients, and more bytes.
SHARED = ("none", "gradients", "weights")
#: Most parts of a stage to compare: published jobs have 1 to 20, most of them 8 or fewer.
PARTS = 8
#: Number of candidates shown.
SHOWN = 5
#: Times that differ by less than this fraction are equal: the candidate with fewer bytes is better.
EQUAL = 1e-3


@dataclass(frozen=True)
class Offer:
    """A machine, and the price of one of its GPUs for an hour; None: unknown."""

    name: str
    machine: Machine = field(repr=False)
    price: float | None


@dataclass(frozen=True)
class Question:
    """The question how best to train `model` on sequences of `tokens` tokens, on up to `gpus` GPUs of one of `offers`.

    `batch` is the number of sequences in a step; with None, each data-parallel group has one per pipeline stage.
    `documents` are the lengths of the documents packed in each sequence, or their distribution. Or, as `phase` says,
    how to serve a "prefill" or a "decode" of `batch` sequences (None: one): `within` limits the seconds until all
    prompts have their first token, or for one token of every sequence. Raises InvalidInput.
    """

    model: ModelConfig
    offers: tuple[Offer, ...]
    tokens: int
    gpus: int
    batch: int | None = None
    software: Software = field(default_factory=Software)
    documents: tuple[int, ...] | Lognormal = ()
    phase: str = "training"
    within: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "gpus", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name}={value}: must be at least 1; try {name}={'1M' if name == 'tokens' else 8}")
        if self.within is not None and not 0 < self.within < float("inf"):
            raise InvalidInput(f"within={self.within}: must be a number of seconds > 0, such as within=0.05")
        if not self.offers:
            raise InvalidInput("no machine to compare; name at least one, such as machine=h100_nvlink_ib")

    @property
    def counts(self) -> list[int]:
        """The numbers of GPUs to compare: `gpus`, and its halves until a number is odd; to serve, powers of two."""
        if self.phase != "training":
            return sorted({*(1 << i for i in range(self.gpus.bit_length())), self.gpus})
        counts = [self.gpus]
        while counts[-1] % 2 == 0:
            counts.append(counts[-1] // 2)
        return counts

    def resized(self, factor: float) -> Question:
        """The question with sequences, or with packed documents, that are `factor` times as long."""
        tokens = max(int(factor * self.tokens), 1)
        if isinstance(self.documents, Lognormal):
            return replace(self, tokens=tokens)
        documents = tuple(max(int(factor * length), 1) for length in self.documents)
        return replace(self, documents=documents, tokens=sum(documents) or tokens)

    def step(self, machine: Machine, parallel: Parallel, attend: Attend = attention_of_layers) -> StepEstimate:
        """A step of training on `machine`."""
        return training_step(self.model, machine, self.tokens, parallel, attend)


@dataclass(frozen=True)
class TrainingCandidate:
    """One way to train a model (GPUs, parallelism, layout, schedule), with its simulated step."""

    offer: Offer
    parallel: Parallel
    step: StepEstimate
    #: Seconds of attention at the rate of a full GPU, without messages: a lower bound for every schedule.
    least_attention: float

    @property
    def seconds(self) -> float:
        """Seconds that training on 1e9 tokens takes."""
        return 1e9 / self.step.tokens * self.step.seconds

    @property
    def cost(self) -> float:
        """The price of training on 1e9 tokens; if the offer has no price, the GPU hours."""
        return self.step.gpu_hours * (1.0 if self.offer.price is None else self.offer.price)

    @property
    def library(self) -> str:
        """The attention library whose speed the prediction uses; "" if it uses the machine's number `flops`."""
        rates = self.offer.machine.kernel_rates
        return rates.library if rates is not None else ""

    @property
    def name(self) -> str:
        """The shape as text, such as "cp=8 tp=4": the numbers cp, dp, tp, pp and ep that exceed 1."""
        return self.parallel.name

    @property
    def is_tight(self) -> bool:
        """Whether the GPU's memory might not suffice, because an allocator may reserve more than there is."""
        return self.offer.machine.memory is not None and self.step.reserved > self.offer.machine.memory

    @property
    def pace(self) -> int:
        """The time per token on a logarithmic scale, in steps of `EQUAL`: almost equal candidates are equal."""
        return round(log(self.step.seconds / self.step.tokens) / EQUAL)

    @property
    def order(self) -> tuple[bool, int, int]:
        """The sort key among candidates on equally many GPUs: tight ones last, then by `pace`, then by bytes."""
        return self.is_tight, self.pace, self.step.bytes

    @property
    def choices(self) -> str:
        """The checkpointing, the sharding and, if interleaved, the number of parts of a pipeline stage, as text."""
        parallel = self.parallel
        parts = f", interleaved={parallel.interleaved}" if parallel.interleaved > 1 else ""
        return f"checkpointing={parallel.checkpointing}, sharding={parallel.shard}{parts}"


@dataclass
class Found:
    """The result of a search on one machine and number of GPUs: the best candidates, and why others were left out."""

    #: The best simulated candidate of each shape, best first.
    best: list[TrainingCandidate] = field(default_factory=list)
    #: How many candidates ended in each way: simulated, slower, too large, refused.
    counts: Counter[str] = field(default_factory=Counter)
    #: Candidates that do not fit, some with only a lower bound as their step.
    too_large: list[TrainingCandidate] = field(default_factory=list)
    #: Refused candidates by reason.
    refused: Counter[str] = field(default_factory=Counter)


def search(question: Question, offer: Offer, gpus: int, shown: int) -> Found:
    """Find at least the `shown` best candidates of different shapes on `gpus` GPUs; no candidate left out is faster.

    A shape is the numbers cp, dp, tp, pp and ep. Candidates are simulated in the order of a lower bound of their time,
    until the bound of the next one exceeds the simulated time of the last one shown. Candidates whose memory might not
    suffice, because of fragmentation, come last.
    """
    found, best = Found(), dict[str, TrainingCandidate]()
    waiting: list[TrainingCandidate] = []
    for parallel in list_spreads(question, offer.machine, gpus):
        plans = list_plans(offer.machine, question.model, parallel)
        try:
            step = question.step(offer.machine, parallel, least_attention_of_layers)
        except RingAttentionError as error:
            found.refused[str(error)] += len(plans)
            continue
        attention = sum(step.parts[name] for name in ATTENTION_PARTS)
        for layout, schedule in plans:
            spread = replace(parallel, layout=layout, schedule=schedule)
            bound = TrainingCandidate(offer, spread, step, attention)
            if step.fits is False:
                found.too_large.append(bound)
            else:
                waiting.append(bound)
    waiting.sort(key=lambda one: one.pace)
    for place, bound in enumerate(waiting):
        paces = sorted(one.pace for one in best.values() if not one.is_tight)
        if len(paces) >= shown and bound.pace > paces[shown - 1]:
            found.counts["slower"] = len(waiting) - place
            break
        try:
            candidate = replace(bound, step=question.step(offer.machine, bound.parallel))
        except RingAttentionError as error:
            found.refused[str(error)] += 1
            continue
        if candidate.step.fits is False:
            found.too_large.append(candidate)
            continue
        found.counts["simulated"] += 1
        if candidate.order < best.setdefault(candidate.name, candidate).order:
            best[candidate.name] = candidate
    found.counts |= {"too large": len(found.too_large), "refused": found.refused.total()}
    found.best = sorted(best.values(), key=lambda one: one.order)
    return found


def list_spreads(question: Question, machine: Machine, gpus: int) -> Iterator[Parallel]:
    """Every way to split `gpus` GPUs into cp x dp x tp x pp, with each ep, checkpointing and sharding.

    tp stays within a node and divides the K/V heads; a rank has at least the rows of one thread block. Each pipeline
    stage is tried as a whole, and interleaved: in the largest number of parts, at most PARTS, that divides its layers.
    """
    model = question.model
    for tp, cp, pp in product(divisors(gpus), repeat=3):
        dp = gpus // (tp * cp * pp)
        if (
            tp * cp * pp * dp != gpus
            or tp > machine.ranks_per_node
            or machine.ranks_per_node % tp
            or any(count % tp for count in (model.heads, model.kv_heads, model.mlp))
            or (cp > 1 and cp * BLOCK > question.tokens)
            or pp > model.layers
            or (question.batch is not None and question.batch % dp)
        ):
            continue
        rows = pp if question.batch is None else question.batch // dp
        parts = {1} if rows % pp else {1, max(i for i in range(1, PARTS + 1) if (model.layers // pp) % i == 0)}
        shards = SHARED if cp * dp > 1 else SHARED[:1]
        experts = divisors(gcd(model.experts - model.shared, cp * dp))
        kinds = CHECKPOINTING[: -1 if model.latent is not None or model.kv_heads == tp else None]
        kinds = kinds if machine.host_bandwidth is not None else CHECKPOINTING[:4]
        for ep, checkpointing, shard in product(experts, kinds, shards):
            options: dict[str, Any] = {"checkpointing": checkpointing, "shard": shard, "software": question.software}
            options["documents"] = question.documents
            parallel = Parallel(cp, dp, tp, ep, rows=rows, pp=pp, **options)
            for interleaved in sorted(parts) if pp > 1 else (1,):
                yield replace(parallel, interleaved=interleaved)


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [i for i in range(1, number + 1) if number % i == 0]


def list_plans(machine: Machine, model: ModelConfig, parallel: Parallel) -> Sequence[tuple[str, str]]:
    """The pairs (layout, schedule) to try for a parallelism."""
    cp, tp = parallel.cp, parallel.tp
    if cp == 1:
        return (("contiguous", "ring"),)
    layouts = [*LAYOUTS] if parallel.documents or any(model.windows) else [*LAYOUTS[:1]]
    layouts += ["balanced"] if parallel.documents else []
    if cp > SMALL:
        return [(layout, "auto" if cp <= LARGE else "ring") for layout in layouts]
    node = max(machine.ranks_per_node // tp, 1)
    # Without a window every block visits every rank, so that sending it directly saves nothing over the ring.
    schedules = ["ring", "allgather", *(["direct"] if any(model.windows) else [])]
    if 1 < node < cp and cp % node == 0:
        schedules.append(f"double_ring({node})")
    groups = node if node > 1 else cp
    pieces = parallel.pieces(model)
    shared = (cp, model.heads // tp // pieces, model.kv_heads // tp // pieces)
    schedules += [
        f"ulysses({count}, ring)"
        for count in range(2, min(groups, cp) + 1)
        if not any(number % count for number in (*shared, groups))
    ]
    return [(layout, schedule) for layout in layouts for schedule in schedules]


def least_attention_of_layers(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel
) -> list[tuple[int, LayerAttention]]:
    """A lower bound on the time and memory of attention: (number of layers, bound for one of them) pairs.

    It holds for every schedule: the computing time assumes visible pairs at the rate of a fully occupied GPU, equally
    divided among ranks; the memory is what every schedule needs. Messages, which are left out, only add to both, as do
    latents (expanding or absorbing them) and the scores of an indexer.
    """
    rows, rates = parallel.rows * ceil(tokens / parallel.cp), machine.kernel_rates
    item = ITEM_BYTES[parallel.software.dtype]
    wide, heads = max(item, 4), model.heads // parallel.tp
    output, dims = heads * model.value_dim, model.head_dim + model.value_dim
    of_keys = max(model.kv_heads // parallel.tp, 1) * dims if model.latent is None else model.latent.rank
    inputs = heads * model.head_dim + of_keys
    # The gradient of the output; accumulators of q, k and v; the gradients of one visit.
    buffers = rows * (output * item + inputs * 2 * wide // parallel.pieces(model))
    # A zigzag shard has two pieces, each with a partly filled thread block.
    blocks = parallel.rows * heads * (ceil(tokens / parallel.cp) / BLOCK + 2)

    def seconds(pairs: float, backward: bool) -> float:
        """The least seconds for `pairs` query-key pairs on a rank; 0 with measured kernel times.

        Their best rate is unknown.
        """
        if machine.kernel is not None:
            return 0.0
        if rates is None:
            return pairs * 2 * dims * (BACKWARD if backward else 1.0) / machine.flops
        return pairs * rates.pair_seconds(blocks, dense=True, dims=dims, backward=backward, item=item)

    layers = []
    for window, count in Counter(model.windows).items():
        seen = count_pairs(window or model.chosen, tokens, parallel.lengths(tokens))
        pairs = parallel.rows * heads * seen / parallel.cp
        layers.append((count, LayerAttention(seconds(pairs, False), seconds(pairs, True), buffers, "")))
    return layers
