"""Settings dataclasses of the verbs of the command line, and the parser of sizes such as 64k."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any

from ...errors import InvalidInput
from ...pattern import parse_patterns
from ...plan.schedules import takes_node
from ...plan.steps import PlanSizes
from ...registry import Registry
from ...text import shorten
from .defaults import settings_of
from .groups import (
    ConfigGroup,
    InputGroup,
    LayoutGroup,
    MachineGroup,
    OutputGroup,
    PatternGroup,
    RunOutputGroup,
    ScheduleGroup,
    Size,
    TransportGroup,
    check_choice,
    check_least,
    refuse,
)

#: The largest size: the largest signed 64-bit integer.
MAX_SIZE = (1 << 63) - 1
#: Factors of the suffixes of a size.
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(value: Size, name: str = "size") -> int:
    """The integer value of a size such as 4096, 1_000_000, 1e9, or 64k, 1M, 2GiB (powers of 1024).

    Raises InvalidInput, naming the setting `name`, if `value` is not a whole number in 0 .. `MAX_SIZE`.
    """
    text = str(value).strip().replace("_", "").lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d{1,4})?)(?:([kmgt])(?:ib)?)?", text)
    number = Decimal(match[1]) * _SUFFIXES[match[2] or ""] if match is not None else Decimal("nan")
    if number != number.to_integral_value():
        problem = "is negative" if re.fullmatch(r"-\d.*", text) else "not a whole number"
        raise InvalidInput(f"{name}={value}: {problem}; write 4096, 64k (65,536), 1M (1,048,576), 8GiB or 1e9")
    if number > MAX_SIZE:
        raise InvalidInput(
            f"{name}={shorten(str(value), 40)}: must be at most 2^63 - 1 = {MAX_SIZE:,}; give a smaller number"
        )
    return int(number)


@dataclass
class ProblemSizes:
    """The settings shared by `run`, `plan`, `simulate` and `verify`."""

    pattern: PatternGroup
    layout: LayoutGroup
    schedule: ScheduleGroup
    machine: MachineGroup
    output: OutputGroup
    #: Read only by Hydra: an experiment sets other keys.
    experiment: Any
    ranks: int
    tokens: Size
    heads: int
    kv_heads: int | None
    head_dim: int
    dtype: str
    comm_dtype: str | None
    rotate: str
    reproducible: int | None

    def size(self) -> int:
        """The number of tokens of the sequence. Raises InvalidInput."""
        return parse_size(self.tokens, "tokens")

    def sizes(self) -> dict[str, Any]:
        """The arguments of `PlanSizes`, which `make_plan` also takes, that the verb has."""
        return {field.name: getattr(self, field.name) for field in fields(PlanSizes) if hasattr(self, field.name)}

    def queries(self) -> dict[str, Any]:
        """Keyword arguments of `make_plan` for queries at other positions than the keys. Raises InvalidInput."""
        return {}


@settings_of("run")
class RunConfig(ProblemSizes):
    """The settings of `ringattn run`; conf/run.yaml explains each."""

    output: RunOutputGroup
    transport: TransportGroup
    kernel: ConfigGroup
    input: InputGroup
    batch: int
    mode: str
    context: Size
    new: Size
    merge: str
    windows: str
    offload: str | None
    chunk: Size | None
    device: str | None
    scale: float | None
    backward: bool
    deterministic: bool
    repeat: int
    sample: int
    threads: int | None
    timeout: float
    trace: str | None

    def __post_init__(self) -> None:
        if self.dtype == "auto":  # fast CUDA ops need 16 bits; a file has its own dtype
            on_cuda = self.transport.spec == "nccl" or self.transport.gpu_aware
            self.dtype = "bfloat16" if on_cuda and self.input.name != "file" else "float32"
        # Here, before the verb imports torch, which takes seconds.
        check_least(self, ranks=1, repeat=1, sample=0)
        parse_patterns(self.pattern.spec)
        self.size()
        if self.input.name != "file":
            PlanSizes(**self.sizes())

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in combination with the others."""
        check_choice("mode", self.mode, ("attention", "decode"))
        if self.mode == "decode":
            unused = "tokens offload device backward repeat schedule comm_dtype rotate reproducible trace output.path"
            refuse(self, unused, "with mode=decode, which takes context= and new=")
        else:
            refuse(self, "context new merge windows", "without mode=decode")
        if self.offload is None:
            refuse(self, "device" if self.mode == "decode" else "chunk device", "without offload=host or offload=disk")
        else:  # one process computes chunk by chunk and sends nothing
            rings = "transport ranks layout schedule machine comm_dtype rotate reproducible timeout"
            refuse(self, rings, f"with offload={self.offload}, one process without messages (chunk= sets its rows)")
        if self.input.name == "file":
            sizes = "tokens heads kv_heads head_dim batch dtype input.seed"
            refuse(self, sizes, "with input=file, where the file determines it")
        if self.input.name == "random":
            refuse(self, "input.path", "with input=random")


@dataclass
class TwoSides(ProblemSizes):
    """The settings shared by `plan`, `simulate` and `verify`, whose queries may be at other positions than their keys.

    `q_tokens` is the number of queries, and `q_first` the position of the first one. `shard` sets the tokens per rank.
    """

    shard: Size | None
    q_tokens: Size | None
    q_first: Size | None

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in combination with the others."""
        if self.shard is not None:
            refuse(self, "tokens", "with shard=, which sets the tokens to shard x ranks (shard=null unsets it)")

    def length(self) -> int:
        """The number of tokens of the sequence; may be 0. Raises InvalidInput for a size that cannot be parsed."""
        return super().size() if self.shard is None else parse_size(self.shard, "shard") * self.ranks

    def size(self) -> int:
        """The number of tokens of the sequence. Raises InvalidInput if it is empty."""
        tokens = self.length()
        if not tokens and self.ranks:  # for ranks=0, other code raises an error about the ranks
            name = "tokens" if self.shard is None else "shard"
            raise InvalidInput(f"{name}=0: there is nothing to compute; try {name}=64k")
        return tokens

    @property
    def is_square(self) -> bool:
        """True if the queries have the positions of the keys."""
        return self.q_tokens is None and self.q_first is None

    @property
    def chooses(self) -> bool:
        """Whether the layout, the schedule or `rotate` depends on the numbers of the machine."""
        by_time = not self.is_square and self.rotate.startswith("auto")
        return by_time or "auto" in (self.layout.spec, self.schedule.spec) or takes_node(self.schedule.spec)

    def queries(self) -> dict[str, Any]:
        """Keyword arguments of `make_plan` for queries at other positions than the keys; {} for equal positions.

        Raises InvalidInput.
        """
        if self.is_square:
            return {}
        tokens = self.size()
        first = None if self.q_first is None else parse_size(self.q_first, "q_first")
        count = tokens - (first or 0) if self.q_tokens is None else parse_size(self.q_tokens, "q_tokens")
        first = tokens - count if first is None else first
        if count < 0 or first < 0:
            wrong = f"q_first={self.q_first}" if count < 0 else f"q_tokens={self.q_tokens}"
            raise InvalidInput(
                f"{wrong}: there are only {tokens:,} keys; give smaller values, or both q_first= and q_tokens="
            )
        return {"q_layout": f"shifted({self.layout.spec}, {first})", "q_tokens": count}


@settings_of("plan")
class PlanConfig(TwoSides):
    """The settings of `ringattn plan`; conf/plan.yaml explains each."""

    value_dim: int | None
    block: Any
    batch: int
    rank: int | None
    steps: bool
    ascii: bool
    state: str | None

    def state_sizes(self) -> tuple[int, int, int] | None:
        """The heads, key dim and value dim of a recurrent state. Raises InvalidInput."""
        if self.state is None:
            return None
        sizes = [parse_size(part, "state") for part in self.state.split("x")]
        if len(sizes) != 3 or 0 in sizes:
            raise InvalidInput(f"state={self.state}: expected heads x keys x values, such as state=32x128x128")
        return sizes[0], sizes[1], sizes[2]

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in combination with the others, or a wrong `state`."""
        super().check()
        self.state_sizes()
        if self.rank is not None:
            refuse(self, "steps", "with rank=, which lists the steps of one rank")
            refuse(self, "" if self.chooses else "machine", "with rank=, a named layout and a named schedule")
        elif self.output.path is None:
            refuse(self, "steps", "without output.path= or --json: the steps are only written")


@settings_of("simulate")
class SimulateConfig(TwoSides):
    """The settings of `ringattn simulate`; conf/simulate.yaml explains each.

    `slow`, `slow_links` and `stalls` are mappings or lists; `timing.simulate` checks them.
    """

    value_dim: int | None
    block: Any
    batch: int
    backward: bool
    slow: Any
    slow_links: Any
    stalls: Any
    passes: int | None
    solver: str
    trace: str | None

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in combination with the others."""
        super().check()
        matmul = "machine.matmul " * (self.block is None)  # rows of a block are expanded by a product
        of_models = f"{matmul}machine.peak machine.matmul_fp8 machine.host_bandwidth machine.in_switch"
        refuse(self, of_models, "for a single attention, only in ringattn estimate")
        if not self.backward:
            rotate = "rotate " * (self.is_square and ", " not in self.rotate)
            refuse(self, f"{rotate}machine.call_backward machine.sweep_backward", "without backward=true")
        machine = self.machine.made()
        if not machine.mtbf or not self.passes:
            refuse(self, "machine.checkpoint machine.restart", "without machine.mtbf=... and passes=...")
        if "allgather" not in self.schedule.spec and "auto" not in self.schedule.spec:
            refuse(self, "machine.one_gather", "without schedule=allgather, whose messages it combines")
        if machine.kernel is None:
            refuse(self, "machine.extrapolate", "without kernel times, which only machine=file has")


@settings_of("verify")
class VerifyConfig(TwoSides):
    """The settings of `ringattn verify`; conf/verify.yaml explains each. `rows` is a size or a list of sizes."""

    backward: bool
    whole: bool
    rows: Any
    spread: int | None
    first: int
    count: int | None
    together: int
    period: int | None
    seed: int
    state: str | None
    threads: int | None

    def check(self) -> None:
        """Raise InvalidInput for a setting that has no effect in combination with the others."""
        super().check()
        if not self.chooses:
            refuse(self, "machine", "here, unless layout=auto or schedule=auto uses it")
        if self.whole:
            refuse(self, "rows spread", "with whole=true")
        else:
            refuse(self, "first count together backward", "without whole=true")
        if not self.backward and self.is_square and ", " not in self.rotate:
            refuse(self, "rotate", "without backward=true")


@settings_of("doctor")
class DoctorConfig:
    """The settings of `ringattn doctor`; conf/doctor.yaml explains them."""

    capability: str | None


#: The dataclass of the settings of each verb, by name.
SCHEMAS: Registry[type] = Registry(
    "schemas",
    {verb: f"cli.config.schema:{verb.capitalize()}Config" for verb in ("run", "plan", "simulate", "verify", "doctor")},
)
