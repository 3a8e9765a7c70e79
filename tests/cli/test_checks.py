"""Of `simulate` and `verify`, every setting has an effect or is refused; wrong types are told, progress is heard."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import modules_after
from measured import times
from omegaconf import OmegaConf
from rich.console import Console

import ringattn as ra
from ringattn import InvalidInput, Machine, make_plan, simulate
from ringattn.cli.config.defaults import read_defaults
from ringattn.cli.config.groups import InputGroup, LayoutGroup, OutputGroup, PatternGroup, ScheduleGroup, TransportGroup
from ringattn.cli.config.overrides import compose
from ringattn.cli.config.schema import SCHEMAS, PlanConfig, RunConfig, SimulateConfig, VerifyConfig
from ringattn.cli.main import VERBS
from ringattn.lab.verbs.settings import CalibrateConfig, EstimateConfig, ReportConfig
from ringattn.machine.kernel_times import KernelTimes
from ringattn.machine.machine import MACHINE_NUMBERS
from ringattn.simulator.progress import listening
from ringattn.simulator.reporting.console import ProgressLines, show_progress
from ringattn.simulator.timing.solvers.delay import DEPTH

#: Values of settings of `simulate` and `verify` that are not the default, where no other number does.
OTHERS: dict[str, Any] = {
    **{"pattern": PatternGroup("Full()"), "layout": LayoutGroup("contiguous"), "schedule": ScheduleGroup("ulysses(2)")},
    **{"tokens": 512, "shard": 32, "heads": 4, "kv_heads": 1, "dtype": "bfloat16", "comm_dtype": "bfloat16"},
    **{"rotate": "kv", "slow": {1: 2.0}, "slow_links": {1: 50.0}, "stalls": [[1, 0, 0.5]], "solver": "events"},
    **{"machine.spec": "cuda", "machine.path": "m.yaml", "machine.bandwidth": 1e4},
    **{"machine.deferred": False, "rows": 3, "spread": 1, "period": 37},
}
#: What says where results go or how a computation runs; a trace is tried in test_trace.py; nodes of equal links.
ELSEWHERE = (
    *("output.path", "experiment", "threads", "state", "trace"),
    *("machine.cores", "machine.ranks_per_node", "machine.one_gather"),  # cores: with machine.ranks_per_node
)


def others(config: Any, prefix: str = "") -> dict[str, Any]:
    """A value of each setting that is not the default; those of a whole group stay together."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if key in ELSEWHERE:
            continue
        if dataclasses.is_dataclass(value) and key not in OTHERS:
            found |= others(value, f"{key}.")
        elif key in OTHERS:
            found[key] = OTHERS[key]
        elif prefix == "machine." and field.name in MACHINE_NUMBERS:
            found[key] = MACHINE_NUMBERS[field.name].python_type(3)
        else:
            found[key] = not value if isinstance(value, bool) else [8] if isinstance(value, list) else 2
    return found


def changed(config: Any, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    return dataclasses.replace(config, **{first: changed(getattr(config, first), rest, value) if rest else value})


def base(path: Path, verb: str = "simulate", **more: Any) -> Any:
    sizes: dict[str, Any] = {"ranks": 4, "tokens": 256, "heads": 2, "head_dim": 16}
    return SCHEMAS[verb](layout=LayoutGroup("zigzag"), output=OutputGroup(str(path)), **sizes, **more)


def outcome(config: SimulateConfig | VerifyConfig) -> dict[str, Any]:
    """All that is written, without what only repeats the question, and without measured times."""
    VERBS["verify" if isinstance(config, VerifyConfig) else "simulate"](config)
    assert config.output.path
    found = json.loads(Path(config.output.path).read_text())
    repeated = ("plan", "machine", "seconds", "peak_bytes", "words")
    return {key: value for key, value in found.items() if key not in repeated}


@pytest.mark.parametrize("verb", ["simulate", "verify"])
def test_every_setting_has_an_effect_or_is_refused(tmp_path: Path, verb: str) -> None:
    plain = base(tmp_path / "a.json", verb)
    before = outcome(plain)
    assert before == outcome(plain), "what is compared must not change by itself"
    refused = set()
    for key, value in others(SCHEMAS[verb]()).items():
        try:
            after = outcome(changed(plain, key, value))
        except ra.RingAttentionError:
            refused.add(key)
            continue
        assert after != before, f"{key}={value} changes nothing for {verb}, and nobody is told"
    # What could not be tried may hide a setting that is honoured.
    honoured = {
        "simulate": {"backward", "slow", "stalls", "passes", "solver", "machine.watts", "dtype"},
        "verify": {"heads", "seed", "whole", "rows", "period", "layout"},
    }
    assert not honoured[verb] & refused


def test_needs_are_met_where_they_say(tmp_path: Path) -> None:
    """The same settings beside what gives them a meaning change what is found."""
    failures = {"machine.mtbf": 1e6, "machine.checkpoint": 2e6, "machine.restart": 1.0, "passes": 10**8}
    for beside, key, value in (
        ({"backward": True}, "rotate", "kv"),
        (failures, "machine.restart", 4.0),
        (failures, "machine.checkpoint", 1e9),
    ):
        config = base(tmp_path / "a.json")
        for name, given in beside.items():
            config = changed(config, name, given)
        assert outcome(config) != outcome(changed(config, key, value)), key


def test_cuda_ranks_compute_16_bits_where_no_dtype_is_given() -> None:
    """The fast ops of CUDA take no fp32."""
    for overrides, dtype in (
        ((), "float32"),
        (("transport=nccl",), "bfloat16"),
        (("transport=nccl", "dtype=float32"), "float32"),
        (("transport=mpi", "transport.gpu_aware=true"), "bfloat16"),
    ):
        assert OmegaConf.to_object(compose("run", overrides)).dtype == dtype  # type: ignore[union-attr]
    of_file = RunConfig(transport=TransportGroup("nccl"), input=InputGroup("file", path="x.safetensors"))
    of_file.check()  # a file's tensors have a dtype


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CalibrateConfig(), {"machine.bandwidth": 1e9}, "machine.bandwidth=1000000000.0 has no meaning here"),
        (CalibrateConfig(), {"ranks": 3, "transport.spec": "none"}, "ranks=3 has no meaning with"),
        (SimulateConfig(), {"shard": "1k", "tokens": "4k"}, "tokens=4k has no meaning with shard="),
        (PlanConfig(), {"shard": "1k", "tokens": "4k"}, "tokens=4k has no meaning with shard="),
        (SimulateConfig(), {"machine.peak": 1e15}, "machine.peak=1000000000000000.0 has no meaning for a single"),
        (EstimateConfig(), {"phase": "prefill", "pp": 2}, "pp=2 has no meaning with phase="),
        (PlanConfig(rank=0), {"machine.spec": "cpu", "schedule.spec": "ring"}, "a named layout and a named schedule"),
        (PlanConfig(), {"steps": True}, "steps=True has no meaning without output.path= or --json"),
        (RunConfig(), {"input.name": "file", "heads": 4}, "heads=4 has no meaning with input=file"),
        (RunConfig(), {"chunk": "1k"}, "chunk=1k has no meaning without offload="),
        (RunConfig(), {"offload": "host", "layout.spec": "zigzag"}, "layout=zigzag has no meaning with offload=host"),
        (ReportConfig(), {"suite": "long", "compare": ["a", "b"]}, "suite=long has no meaning beside stored results"),
        (ReportConfig(), {"results": "a", "compare": ["a", "b"]}, "results=a has no meaning beside compare="),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_without_effect_is_refused(config: Any, change: dict[str, Any], words: str) -> None:
    config.check()
    for key, value in change.items():
        config = changed(config, key, value)
    with pytest.raises(InvalidInput) as caught:
        config.check()
    assert words in str(caught.value) and str(caught.value).endswith("; leave it out")


@pytest.mark.parametrize("verb", SCHEMAS)
def test_defaults_of_schemas_are_those_of_the_command_line(verb: str) -> None:
    """`check` takes what differs from them for a setting of the user."""
    composed, made = compose(verb, []), SCHEMAS[verb]()
    if verb == "calibrate":  # whose path names the job
        composed.output.path = made.output.path = None
    assert OmegaConf.to_object(composed) == made


@pytest.mark.parametrize(
    ("verbs", "apart"),
    [
        # A run on CUDA has 16 bits; what is verified in fp64 shows every error.
        (("run", "plan", "simulate", "verify"), {"dtype"}),
        # The sequences of one data-parallel group; those of all GPUs.
        (("estimate", "advise"), {"batch"}),
    ],
)
def test_verbs_that_share_a_key_share_its_default(verbs: tuple[str, ...], apart: set[str]) -> None:
    """What is asked of one verb in the same words is asked of another."""
    given = [read_defaults(verb) for verb in verbs]
    shared = {key for key in set().union(*given) if sum(key in each for each in given) > 1} - {"output"}
    assert len(shared) > 8
    differing = {key for key in shared if len({json.dumps(each[key]) for each in given if key in each}) > 1}
    assert differing == apart


def test_numerics_are_asked_for_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": "1e9"}, "a sequence of 256 tokens has only 256 query rows; try rows=256"),
        ({"rows": 100, "spread": 1}, "only 64 query rows on at most 1 rank; try rows=64"),
        ({"seed": -1}, "seed=-1: expected an integer >= 0"),
    ]
    for options, words in cases:
        config = base(path, "verify")
        for key, value in options.items():
            config = changed(config, key, value)
        with pytest.raises(InvalidInput, match=re.escape(words)):
            VERBS["verify"](config)
    few = changed(base(path, "verify"), "tokens", 8)
    assert outcome(few)["rows"] == 8, "the default is as many as there are"


PLAN = make_plan(ra.Full(), tokens=64, ranks=4, schedule="ring")
EVEN = Machine(flops=1e8, latency=1e-4, bandwidth=2e7)


def test_why_shards_are_not_alike() -> None:
    for tokens, ranks, layout, words in (
        (64, 100, "contiguous", "100 ranks are more than 64 tokens, so some ranks have none"),
        (66, 4, "contiguous", "66 tokens do not divide into 4 equal chunks"),
        (68, 4, "zigzag", "68 tokens do not divide into 8 equal chunks"),
        (1, 8192, "contiguous", "8,192 ranks are more than 1 token,"),
    ):
        plan = make_plan(ra.Causal(), tokens=tokens, ranks=ranks, layout=layout, schedule="ring")
        if ranks > 4096:
            with pytest.raises(ra.Unsupported, match=r"so some ranks have none; .*ranks of equal size"):
                simulate(plan, EVEN)
        else:
            assert words in simulate(plan, EVEN).why
    striped = make_plan(ra.Causal(), tokens=64, ranks=4, layout="striped", schedule="ring")
    assert "the mask is not one band over contiguous or zigzag ranks" in simulate(striped, EVEN).why


def kernel(**made: Any) -> KernelTimes:
    return dataclasses.replace(times(), **made)


KERNELS: list[dict[str, Any]] = [{"heads": 1}, {}, {"extrapolate": True}]


def test_speeds_of_something_else_are_told() -> None:
    sizes = {"tokens": 64, "ranks": 4, "schedule": "ring"}
    one, many, far = (dataclasses.replace(EVEN, kernel=kernel(**made)) for made in KERNELS)
    cases: list[tuple[Any, dict[str, Any], list[str]]] = [
        ("cuda", {}, ["flops=5e+14 of this machine are for bfloat16, and float32 is as fast [ass"]),
        ("cuda", {"dtype": "float16"}, []),
        ("cpu", {"ranks": 2}, []),
        ("cpu", {}, ["each of 4 ranks has its own core [assumed]"]),
        ("cpu", {"ranks": 2, "dtype": "bfloat16"}, ["are for float32"]),
        ("gtx1080_pcie", {}, []),
        (ra.MACHINES["cuda"].changed(flops=1e14), {}, []),
        (one, {}, []),
        (many, {"heads": 2}, []),
        (one, {"heads": 2, "head_dim": 32}, ["head_dim=64, and head_dim=32", "heads=1, and heads=2"]),
        (far, {"dtype": "float64"}, ["dtype=float32, and dtype=float64"]),
    ]
    for machine, options, words in cases:
        notes = simulate(make_plan(ra.Full(), **{**sizes, **options}), machine).notes
        found = [note for note in notes if "no published measurement" not in note]
        assert len(found) == len(words) and all(word in note for word, note in zip(words, found, strict=True)), found
    with pytest.raises(InvalidInput, match=r"flops_dtype='bfloat32': did you mean 'b?float\d\d'"):
        dataclasses.replace(EVEN, flops_dtype="bfloat32")


def test_long_computations_tell_how_far_they_are() -> None:
    told: list[tuple[int, int, str]] = []
    ring = make_plan(ra.Full(), tokens=600, ranks=300, schedule="ring", layout="contiguous")
    causal = make_plan(ra.Causal(), tokens=600, ranks=300, schedule="ring", layout="contiguous")
    for plan, options, steps in (
        (ring, {"slow": {3: 2.0, 4: 3.0}, "solver": "stencil"}, 299),
        (causal, {"solver": "stencil"}, 300),
    ):
        told.clear()
        with listening(lambda *one: told.append(one)):
            heard = simulate(plan, EVEN, **options)  # type: ignore[arg-type]
        count = -(-steps // DEPTH)
        once = [(done, count, f"steps by {DEPTH}") for done in range(count)]
        assert told in (once, once * 2)  # a ring that waits is solved again, with messages that take no time
        told.clear()
        assert simulate(plan, EVEN, **options).seconds == heard.seconds and not told  # type: ignore[arg-type]


def test_progress_is_a_bar_on_terminals_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def shown(**options: Any) -> str:
        nonlocal now
        file = StringIO()
        terminal = options.pop("terminal", False)
        console = Console(file=file, force_terminal=terminal, width=80, stderr=True)
        with show_progress(console, **options) as tell:
            for done in range(100):
                tell(done, 100, "steps")
                now += 8.0  # each unit of work takes 8 seconds, where the clock is this one
        return file.getvalue()

    assert "steps" in shown(terminal=True) and shown(terminal=True, shown=False) == ""
    assert shown() == ""
    lines = shown(tenths=True).splitlines()
    assert lines == [f"ringattn: steps: {done} of 100" for done in range(0, 100, 10)]
    monkeypatch.setattr("ringattn.simulator.reporting.console.time.monotonic", lambda: now)
    lines = shown().splitlines()
    assert lines[:2] == ["ringattn: steps: 4 of 100", "ringattn: steps: 8 of 100"]
    assert lines[2] == "ringattn: steps: 12 of 100, about 11.7 min left"  # from a tenth on
    assert len(lines) == 24 and shown(shown=False) == ""


def test_loops_within_loops_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner loops of 10 s each, on a pipe: a line every 25 s, with the time left from a tenth of a loop on."""
    now, out = 0.0, StringIO()
    monkeypatch.setattr("ringattn.simulator.reporting.console.time.monotonic", lambda: now)
    tell, spoken = ProgressLines(Console(file=out, width=200), tenths=False), [0.0]
    for _ in range(20):
        for done in range(10):
            before = out.tell()
            tell(done, 10, "steps")
            spoken += [now] * (out.tell() > before)
            now += 1.0
    assert max(b - a for a, b in pairwise(spoken)) <= 26 and len(spoken) < 10
    assert all(("left" in line) == ("steps: 0 of" not in line) for line in out.getvalue().splitlines())


def test_a_unit_that_takes_long_is_told_with_what_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = 0.0, StringIO()
    monkeypatch.setattr("ringattn.simulator.reporting.console.time.monotonic", lambda: now)
    with ProgressLines(Console(file=out, width=200), tenths=False) as tell:
        for done in range(4):
            tell(done, 5, "cases")
            now += 10.0
        for _ in range(3):
            now += 30.0
            tell._print()  # as its thread does
        tell(4, 5, "cases")  # right after a line of the thread: says nothing
        now += 100.0
        tell._print()
    lines = [line.removeprefix("ringattn: cases: ") for line in out.getvalue().splitlines()]
    assert lines == [
        "3 of 5, about 20 s left",
        "3 of 5, 40 s in this one, about 17.5 s left",
        "3 of 5, 70 s in this one, about 25 s left",
        "3 of 5, 100 s in this one, about 32.5 s left",
        "4 of 5, 100 s in this one",
    ]


def test_progress_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ringattn.simulator.reporting.console.INTERVAL", 1.0)
    with show_progress(Console()) as tell:
        tell(3, 9, "blocks")
        found, deadline = capsys.readouterr(), time.monotonic() + 60
        while not found.err and time.monotonic() < deadline:  # a unit of work that takes long is not silent
            time.sleep(0.1)
            found = capsys.readouterr()
    assert not found.out and re.fullmatch(r"ringattn: blocks: 3 of 9, \S+ s in this one\n", found.err)
    assert "rich" not in modules_after("import ringattn as ra; ra.simulate(ra.make_plan(ra.Full(), tokens=8, ranks=2))")
