"""Overrides as Hydra takes them, and what it refuses in one line, with a hint."""

from __future__ import annotations

import re

import pytest

import ringattn as ra
from ringattn.cli import ranks
from ringattn.cli.config.groups import MachineGroup
from ringattn.cli.config.overrides import as_study, check_parameters, compose, parse_arguments, prepare
from ringattn.cli.config.schema import RunConfig
from ringattn.errors import InvalidInput
from ringattn.transport.launcher import Launch


@pytest.mark.parametrize(
    ("verb", "override", "wanted"),
    [
        ("run", "pattern=causal", ["pattern=causal"]),
        ("run", "pattern=Causal() & Window(4096)", ["pattern=custom", "pattern.spec='Causal() & Window(4096)'"]),
        ("run", "layout=striped(64)", ["layout=custom", "layout.spec='striped(64)'"]),
        ("run", "layout=zigzag,striped(64)", ["layout=custom", "layout.spec='zigzag','striped(64)'"]),
        ("run", "kernel=aten_cuda:flash", ["kernel=custom", "kernel.spec='aten_cuda:flash'"]),
        ("run", "ranks=2,4", ["ranks=2,4"]),
        ("run", "ranks=choice(1e1,2k)", ["ranks=choice(10,2048)"]),
        ("run", "tokens=64k", ["tokens=64k"]),
        ("run", "seed_of_nothing=64k", ["seed_of_nothing=64k"]),
        ("simulate", "machine.bandwidth=400Gb/s,2.5 GB/s", ["machine.bandwidth=50000000000.0,2500000000.0"]),
        ("simulate", "machine.latency=250ms", ["machine.latency=0.25"]),
        ("simulate", "machine.latency=5MB/s", ["machine.latency=5MB/s"]),
        ("report", "cases=DilatedAttention_8192", ["cases=[DilatedAttention_8192]"]),
        ("report", "cases=null", ["cases=null"]),
        ("run", "hydra.verbose=true", ["hydra.verbose=true"]),
        ("plan", "+foo=1", ["foo=1"]),
        ("study", "+axes={ranks: [2, 4]}", ["++axes={ranks: [2, 4]}"]),
        ("simulate", "machine.memory=8G,1.5e9", ["machine.memory=8589934592,1.5e9"]),
        ("simulate", "machine.call=1e-5", ["machine.call=1e-5"]),
        ("study", "axes.ranks=[2]", ["++axes.ranks=[2]"]),
        ("study", "fixed.tokens=8k", ["++fixed.tokens=8k"]),
        ("estimate", "model=my/config.json", ["model=my/config.json"]),
        ("simulate", "machine=machine.yaml", ["machine=file", "machine.path='machine.yaml'"]),
        ("run", "input=qkv.npz", ["input=file", "input.path='qkv.npz'"]),
    ],
)
def test_overrides_as_hydra_takes_them(verb: str, override: str, wanted: list[str]) -> None:
    assert prepare(verb, [override]) == wanted


@pytest.mark.parametrize(
    ("override", "words"),
    [
        *((f"output.path={value}", "output.path=: the value is empty; give one, or") for value in ("", "''", '""')),
        ("~ranks", "~ranks: a key cannot be deleted"),
    ],
)
def test_overrides_that_are_refused(override: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare("run", [override])
    assert str(caught.value).startswith(words)


def test_options_stand_anywhere() -> None:
    found = parse_arguments(["-cd", "a", "plan", "ranks=2", "-m", "--cfg", "job", "layout=zigzag", "--config-dir=b"])
    assert found.words == ["plan", "ranks=2", "layout=zigzag"] and found.multirun
    assert found.options == ["--cfg=job", "--config-dir=b"]
    for wrong, words in (
        (["run", "--jsn"], "--jsn: unknown option; did you mean '--json'?"),
        (["plan", "--experimental-rerun", "x"], "--experimental-rerun: unknown option"),
        (["report", "--compare", "a"], "argument --compare: expected 2 arguments"),
        (["plan", "--cfg", "nope"], "argument --cfg/-c: invalid choice: 'nope' (choose from"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(words)):
            parse_arguments(wrong)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pattern.left=5"], "pattern.left=5 has no meaning with pattern=Causal(); leave it out"),
        (["schedule=ring", "schedule.ranks_per_node=2"], "schedule.ranks_per_node=2 has no meaning with schedule=ring"),
        (["pattern=documents"], "pattern.lengths=... is missing; Causal() & Documents(${.lengths}) needs it"),
    ],
)
def test_parameters_are_those_of_the_option(overrides: list[str], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        check_parameters(compose("plan", overrides))
    check_parameters(compose("plan", ["pattern=window", "pattern.left=5", "layout=balanced", "schedule=ulysses"]))


@pytest.mark.parametrize("number", [3, 10])
def test_a_launcher_says_how_many_ranks_there_are(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "detect", lambda: Launch("mpich", 0, 4, 0, 4))
    with pytest.raises(InvalidInput, match=f"ranks={number}: mpich started 4 ranks; leave ranks out"):
        ranks.check_ranks(RunConfig(ranks=number), "virtual")
    for config in (RunConfig(ranks=4), RunConfig()):
        ranks.check_ranks(config, "virtual")
    monkeypatch.setattr(ranks, "detect", lambda: Launch("none"))
    ranks.check_ranks(RunConfig(ranks=number), "virtual")


def test_nodes_must_fit() -> None:
    with pytest.raises(InvalidInput, match=r"machine.ranks_per_node=3: 8 ranks do not fill nodes of 3 evenly"):
        MachineGroup("cpu", ranks_per_node=3).made(ranks=8)
    for inner in (1, 2, 4, 8, 16):  # ranks of one node need not be all that it has room for
        assert MachineGroup("cpu", ranks_per_node=inner).made(ranks=8).ranks_per_node == inner
    assert MachineGroup("h100_nvlink_ib").made(ranks=12).ranks_per_node == 8, "a preset's nodes are not the user's"
    for name, value in (("node_latency", 1e-6), ("node_bandwidth", 1e11), ("shared_nic", True)):
        with pytest.raises(InvalidInput, match=rf"machine\.{name}=.* every node has one rank; give machine\.ra"):
            MachineGroup("cpu", **{name: value}).made(ranks=8)
        assert getattr(MachineGroup("cpu", ranks_per_node=2, **{name: value}).made(ranks=8), name) == value
        assert MachineGroup("h100_nvlink_ib", **{name: value}).made().ranks_per_node == 8


def test_one_rank_or_one_head_makes_no_ulysses_group() -> None:
    for few, heads, words in (
        (1, 4, "do not divide 1 ranks; try ring"),
        (4, 1, "do not divide 1 query heads; try ring"),
    ):
        with pytest.raises(InvalidInput, match=words):
            ra.make_plan(ra.Full(), tokens=64, schedule="ulysses(2)", ranks=few, heads=heads)
    with pytest.raises(InvalidInput, match="one rank cannot form nodes of 2 ranks; try ring"):
        ra.make_plan(ra.Full(), tokens=64, schedule="double_ring(2)", ranks=1)


def test_comma_lists_become_axes() -> None:
    """Of a study by name, what is varied is no longer fixed; keys of the study itself are left alone."""
    axes = "axes={ranks: ['1', '2'], pattern: ['Window(1, 2)', 'Full()']}"
    assert as_study("study", ["scaling", "ranks=1,2", "heads=4", "pattern=Window(1, 2),Full()", "x=ranks"]) == [
        "study=scaling", "x=ranks", "fixed={ranks: null, heads: '4', pattern: null}", axes
    ]  # fmt: skip
    assert as_study("simulate", ["ranks=range(1,3)"]) == [
        "of=simulate", "fixed={ranks: null}", "axes={ranks: ['1', '2']}"
    ]  # fmt: skip
    assert as_study("study", ["ranks=4", "axes.ranks=[2]", "axes.heads=[1]"]) == [
        "axes.ranks=[2]", "axes.heads=[1]", "fixed={ranks: '4', heads: null}"
    ]  # fmt: skip
    assert as_study("estimate", ["output.path=a,b"]) == ["of=estimate", "output.path=a,b"]
