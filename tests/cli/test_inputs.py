"""Inputs by rows: any shard holds what the whole input holds, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import dense, make_case
from safetensors.torch import save_file

from ringattn import Causal, Pattern, Sinks, Strided, Window, make_layout, mix
from ringattn.cli.config.groups import InputGroup
from ringattn.cli.config.schema import RunConfig
from ringattn.cli.inputs import NAMES, open_source, read_shard, rotate_pairs
from ringattn.simulator.numerics.oracle import oracle_rows, sampled_rows
from ringattn.simulator.numerics.source import counter_normal


def config(**options: object) -> RunConfig:
    name = str(options.pop("name"))
    path = options.pop("path", None)
    given = {"tokens": "101", "heads": 4, "kv_heads": 2, "head_dim": 6, "batch": 2, **options}
    return RunConfig(input=InputGroup(name=name, path=None if path is None else str(path)), **given)  # type: ignore[arg-type]


@pytest.fixture(params=["text", "random", "safetensors", "npz"])
def source(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    if request.param in ("text", "random"):
        return open_source(config(name=request.param, dtype="bfloat16"))
    tensors = {name: torch.randn(2, h, 101, 6) for name, h in (("q", 4), ("k", 2), ("v", 2))}
    path = tmp_path / f"x.{request.param}"
    if request.param == "npz":
        np.savez(path, **{name: x.numpy() for name, x in tensors.items()})
    else:
        save_file({**tensors, "other": torch.zeros(3)}, path)
    return open_source(config(name="file", path=path))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "striped(8)"])
def test_shards_are_rows_of_the_whole(source, layout: str) -> None:  # type: ignore[no-untyped-def]
    whole = [source.rows(name, range(101)) for name in NAMES]
    assert [tuple(x.shape) for x in whole] == [(2, 4, 101, 6), (2, 2, 101, 6), (2, 2, 101, 6)]
    for ranks in (1, 3, 128):
        made = make_layout(layout, tokens=101, ranks=ranks)
        for rank in (0, ranks // 2, ranks - 1):
            for found, x in zip(read_shard(source, made, rank), whole, strict=True):
                assert torch.equal(found, made.shard_tensor(x, rank))


def test_counter_numbers_are_normal_and_independent() -> None:
    index = torch.arange(200_000)
    x, y = counter_normal(0, index), counter_normal(1, index)
    for sample in (x, y):
        assert abs(float(sample.mean())) < 0.01 and abs(float(sample.std()) - 1) < 0.01
        assert abs(float((sample**4).mean()) - 3) < 0.1
    assert abs(float((x * y).mean())) < 0.01 and abs(float((x[1:] * x[:-1]).mean())) < 0.01
    assert torch.equal(counter_normal(5, index[100:200]), counter_normal(5, index)[100:200])


def test_rotary_depends_on_distances_only() -> None:
    q, k = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    here = [rotate_pairs(x.expand(1, 7), torch.tensor([p]))[0] for x, p in ((q, 11), (k, 4))]
    there = [rotate_pairs(x.expand(1, 7), torch.tensor([p]))[0] for x, p in ((q, 1011), (k, 1004))]
    assert float(here[0] @ here[1]) == pytest.approx(float(there[0] @ there[1]), abs=1e-12)
    assert float(here[0].norm()) == pytest.approx(float(q.norm()))


@pytest.mark.parametrize("pattern", [Causal(), Causal() & (Window(9) | Sinks(2)), mix(Causal(), Strided(3)), Sinks(0)])
def test_sampled_oracle_equals_the_dense_oracle(pattern: Pattern) -> None:
    """On shards: three ranks summed by hand."""
    case, rows = make_case(60, 4, 2, torch.float64), sampled_rows(60, 9)
    truth = dense(case, torch.from_numpy(pattern.mask(60, 4))).out[:, :, rows]
    layout = make_layout("zigzag", tokens=60, ranks=1)
    found = oracle_rows(
        pattern, 60, rows, case.factor, layout.positions(0), *(layout.shard_tensor(x, 0) for x in case.inputs),
        lambda x, top: None,
    )  # fmt: skip
    assert (found - truth).abs().max() <= 1e-12
    assert rows[0] == 0 and rows[-1] == 59 and len(rows) == 9


def test_sampled_rows_are_in_range() -> None:
    assert sampled_rows(0, 5) == [] and sampled_rows(5, 0) == []
    assert sampled_rows(3, 10) == [0, 1, 2] and sampled_rows(1, 4) == [0]
