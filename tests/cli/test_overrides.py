"""Overrides that could not be honoured are refused, each with what to do instead."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import ringattn as ra
from ringattn.cli.config.groups import MachineGroup
from ringattn.cli.config.overrides import explain_refusal, prepare
from ringattn.cli.config.schema import SCHEMAS, conf_dir
from ringattn.errors import InvalidInput
from ringattn.transport.launcher import Launch

TWO = Launch("mpich", 0, 2, 0, 2)


@pytest.mark.parametrize(
    ("verb", "overrides", "words"),
    [
        ("run", ["input=file", "input.path=x.npz", "tokens=64"], "tokens=64 has no meaning with input=file"),
        ("run", ["input=file", "input.path=x.npz", "heads=4"], "heads=4 has no meaning with input=file"),
        (
            "run",
            ["input=random", "input.path=x.npz"],
            "has no meaning with input=random; inputs that take path: file, text",
        ),
        ("run", ["input=file"], "input=file needs input.path=..., such as 'input.path=qkv.npz'"),
        ("run", ["wire_dtype=bfloat16"], "unknown key 'wire_dtype'; did you mean 'comm_dtype'?"),
        ("run", ["kernel=flash"], "kernel=flash: unknown option; did you mean 'aten_cuda:flash'?"),
        ("plan", ["pattern=sinks"], "pattern=sinks: unknown option; did you mean 'Sinks()'?"),
        ("plan", ["machine=cpu", "schedule=ring"], "machine=cpu has no meaning for a named layout and schedule"),
        ("plan", ["machine.bandwidth=1e9", "schedule=direct"], "try schedule=auto, or ringattn simulate"),
        ("plan", ["pattern=documents"], "needs pattern.lengths=..., such as 'pattern.lengths=[512,256,256]'"),
        ("run", ["experiment=validate"], "sets mode, which ringattn run does not have; it is for simulate"),
        ("run", ["-m", "ranks=2,4", "output.path=o/x.safetensors"], "'output.path=o/x_${hydra:job.num}.safetensors'"),
        ("plan", ["--multirun", "ranks=2,4", "output.path=p.json"], "every job would replace the output"),
        ("calibrate", ["-m", "heads=2,4"], "output.path=machine.yaml with -m"),
        ("simulate", ["shard=2k", "tokens=4M"], "give shard or tokens, not both"),
        ("report", ["suite=long", "compare=[a.jsonl,b.jsonl]"], "suite=long would have no effect; leave suite out"),
        ("report", ["results=a.jsonl", "compare=[a.jsonl,b.jsonl]"], "give only one of these keys"),
    ],
)
def test_refused(verb: str, overrides: list[str], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare(verb, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("verb", "key", "words"),
    [
        (
            "run",
            "output.path",
            "give a .safetensors file, such as output.path=out.safetensors, or leave output.path out",
        ),
        ("run", "output.report", "give a JSON file"),
        ("run", "input.path", "give a text, or a .safetensors or .npz file"),
        ("plan", "output.path", "give a JSON file, such as output.path=plan.json"),
        ("simulate", "output.path", "or the folder of a study"),
        ("bench", "output.path", "give a folder"),
        ("calibrate", "output.path", "give a machine file"),
        ("plan", "machine.path", "give a machine file"),
    ],
)
def test_an_empty_path_is_refused(verb: str, key: str, words: str) -> None:
    for value in ("", "''", '""'):
        with pytest.raises(InvalidInput) as caught:
            prepare(verb, [f"{key}={value}"])
        assert str(caught.value).startswith(f"{key}=: the path is empty; ") and words in str(caught.value)


def test_every_path_may_be_empty_in_no_command() -> None:
    """A new setting that is a path needs its words."""
    for verb, schema in SCHEMAS.items():
        for key, _ in leaves(schema):
            if key.endswith((".path", ".report")):
                with pytest.raises(InvalidInput, match="the path is empty"):
                    prepare(verb, [f"{key}="])


def test_one_output_for_each_job_of_a_sweep_is_taken() -> None:
    for verb, overrides in (
        ("run", ["-m", "ranks=2,4", "output.path=x_${hydra:job.num}.safetensors"]),
        ("plan", ["-m", "ranks=2,4"]),
        ("bench", ["-m", "repeat=2,4", "output.path=records"]),
        ("plan", ["ranks=2", "output.path=p.json"]),
        ("plan", ["machine=cpu", "schedule=ring", "layout=auto"]),
        ("simulate", ["study=scaling", "shard=null", "tokens=4096"]),
    ):
        assert prepare(verb, overrides) == overrides


@pytest.mark.parametrize("ranks", ["3", "1e1", "2,3"])
def test_a_launcher_says_how_many_ranks_there_are(ranks: str) -> None:
    with pytest.raises(InvalidInput, match=r"ranks=[\d,]+: mpich started 2, and as many take part; leave ranks out"):
        prepare("run", [f"ranks={ranks}"], TWO)
    assert prepare("run", [f"ranks={ranks}"], Launch("none"))


def test_the_number_that_was_launched_is_taken() -> None:
    for overrides in (["ranks=2"], ["tokens=64"], []):
        assert prepare("run", overrides, TWO) == overrides


def test_an_experiment_does_not_say_how_many_were_launched() -> None:
    with pytest.raises(
        InvalidInput, match=r"experiment=window_64k sets ranks=4: mpich started 2, .*; add ranks=2, or have mpich"
    ):
        prepare("run", ["experiment=window_64k"], TWO)
    for overrides, launch in (
        (["experiment=window_64k", "ranks=2"], TWO),
        (["experiment=window_64k"], Launch("mpich", 0, 4, 0, 4)),
        (["experiment=window_64k"], Launch("none")),
        (["experiment=window_64k", "transport=virtual"], TWO),
    ):
        assert prepare("run", overrides, launch) == overrides


def leaves(kind: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, annotation) of all settings of a schema."""
    for field in dataclasses.fields(kind):
        group = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(group):
            yield from leaves(type(group), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, str(field.type)


@pytest.mark.parametrize("verb", SCHEMAS)
def test_values_of_a_wrong_type_are_told_in_our_words(verb: str) -> None:
    """What OmegaConf itself takes and refuses, value by value, for every setting of every command."""
    told = 0
    for key, annotation in leaves(SCHEMAS[verb]):
        wrong = {"bool": "maybe", "int": "[1]", "float": "much", "str": "[a]", "list": "5", "dict": "5", "Size": "[1]"}
        value = wrong.get(annotation.split("[")[0].split(" ")[0])
        if value is None:
            assert annotation == "Any", (key, annotation)
            continue
        config = OmegaConf.structured(SCHEMAS[verb])
        with pytest.raises(OmegaConfBaseException) as cause:
            OmegaConf.update(config, key, yaml.safe_load(value))
        error = ConfigCompositionException(f"Error merging override {key}={value}")
        error.__cause__ = cause.value
        text = str(explain_refusal(verb, error))
        assert text.startswith(f"{key}={value}: expected "), text
        assert (", or null" in text) == ("None" in annotation)
        if "; try " in text:  # what is proposed must be taken
            (override,) = shlex.split(text.split("; try ")[1])
            OmegaConf.update(config, key, yaml.safe_load(override.partition("=")[2]))
            told += 1
    assert told or verb == "doctor"


@pytest.mark.parametrize("path", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_is_for_verbs_that_have_its_keys(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    keys = set(content) - {"defaults"}
    keys |= {key.removeprefix("override /") for entry in content.get("defaults", ()) for key in entry}
    for verb in ("run", "plan", "simulate"):
        if keys <= set(SCHEMAS[verb].__dataclass_fields__):
            assert prepare(verb, [f"experiment={path.stem}"])
        else:
            with pytest.raises(InvalidInput, match=f"experiment={path.stem} sets "):
                prepare(verb, [f"experiment={path.stem}"])


def test_nodes_must_fit() -> None:
    with pytest.raises(
        InvalidInput, match=r"machine.ranks_per_node=3: 8 ranks do not fill nodes of 3 evenly; give a divisor of 8"
    ):
        MachineGroup("cpu", ranks_per_node=3).made(ranks=8)
    for inner in (1, 2, 4, 8, 16):  # ranks of one node need not be all that it has room for
        assert MachineGroup("cpu", ranks_per_node=inner).made(ranks=8).ranks_per_node == inner
    assert MachineGroup("h100_nvlink_ib").made(ranks=12).ranks_per_node == 8, "a preset's nodes are not the user's"
    for name, value in (("node_latency", 1e-6), ("node_bandwidth", 1e11), ("shared_nic", True)):
        with pytest.raises(
            InvalidInput, match=rf"machine\.{name}=.* every rank is a node by itself; give machine\.ranks_per_node="
        ):
            MachineGroup("cpu", **{name: value}).made(ranks=8)
        assert getattr(MachineGroup("cpu", ranks_per_node=2, **{name: value}).made(ranks=8), name) == value
        assert MachineGroup("h100_nvlink_ib", **{name: value}).made().ranks_per_node == 8


def test_one_rank_or_one_head_makes_no_ulysses_group() -> None:
    for options, words in (
        ({"ranks": 1, "heads": 4}, "but only one rank; try ring"),
        ({"ranks": 4, "heads": 1}, "but only one query head; try ring"),
    ):
        with pytest.raises(InvalidInput) as caught:
            ra.make_plan(ra.Full(), tokens=64, schedule="ulysses(2)", **options)  # type: ignore[arg-type]
        assert words in str(caught.value)
    with pytest.raises(InvalidInput, match="one rank cannot be nodes of 2; try ring"):
        ra.make_plan(ra.Full(), tokens=64, schedule="double_ring(2)", ranks=1)


@pytest.mark.parametrize("choice", ["model=my/config.json", "machine=machine.yaml", "input=qkv.npz"])
def test_a_path_chooses_the_file_of_a_group(choice: str) -> None:
    group, path = choice.split("=")
    verb = {"input": "run"}.get(group, "simulate")
    assert prepare(verb, [choice]) == prepare(verb, [f"{group}=file", f"{group}.path='{path}'"])
