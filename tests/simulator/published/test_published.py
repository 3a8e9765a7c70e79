"""Errors of the timing model on published measurements, as a regression test; their bands; what a row's plan is."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringattn as ra
from ringattn.machine.bands import BANDS, SIZES, describe_band, size_class
from ringattn.simulator.published.errors import draw_scatter, group_errors, preset_bands
from ringattn.simulator.published.predictions import (
    CAUSES,
    SOURCES,
    Measurement,
    PredictedRow,
    predict_measurements,
    read_measurements,
)

#: Most (median, P90) of the errors by the preset, and with the source's kernel rate, in the fixed subset.
LIMITS = {
    "zhuzilin": ((0.06, 0.13), (0.065, 0.13)),
    "zhuzilin-varlen": ((0.09, 0.12), (0.08, 0.10)),
    "zhuzilin-old": ((0.08, 0.15), (0.09, 0.12)),
    "magi-h100": ((0.065, 0.13), (0.07, 0.16)),
    "usp-a100-nvlink": ((0.12, 0.25), (0.08, 0.2)),
    "usp-a100-pcie": ((0.18, 0.46), (0.2, 0.6)),
    "kernel-h100": ((0.015, 0.04), None),
}


@pytest.fixture(scope="module")
def predictions() -> list[PredictedRow]:
    """A fixed subset, which takes seconds: up to 8 GPUs, and of USP's table on NVLink the rows with 8 heads of 128."""

    def is_chosen(row: Measurement) -> bool:
        return row.gpus <= 8 and (row.family != "usp-a100-nvlink" or (row.heads, row.head_dim) == (8, 128))

    return predict_measurements([row for row in read_measurements() if is_chosen(row)])


def test_every_row_of_the_file_has_a_source_and_a_plan_of_its_flops() -> None:
    rows = read_measurements()
    assert len(rows) == 387 and {row.family for row in rows} == set(SOURCES)
    assert sum(row.kernel_tflops is not None for row in rows) == 278
    by_id = {row.id: row for row in rows}
    assert all(row.reference in ("", "device") or row.reference in by_id for row in rows)
    ring = by_id["zhuzilin-002"]
    assert [plan.layout.name for plan in ring.plans()] == ["zigzag"] and ring.shard == 8192
    assert 1 / ring.device_seconds() == pytest.approx(591.5, rel=1e-3)
    assert 1 / by_id["zhuzilin-varlen-001"].device_seconds() == pytest.approx(852.4, rel=3e-3)


def test_errors_stay_where_they_are(predictions: list[PredictedRow]) -> None:
    families = {group.name: group for group in group_errors(predictions, lambda one: one.row.family)}
    for name, (preset, source) in LIMITS.items():
        group = families[name]
        assert group.preset.median <= preset[0] and group.preset.p90 <= preset[1], group
        if source is not None:
            assert group.source is not None and group.source.median <= source[0], group
            assert group.source.p90 <= source[1], group
    # All 387 rows, of which the subset has more of the hard ones: 6.0 / 35.0 % and 6.3 / 19.5 %.
    (every,) = group_errors(predictions, lambda one: "all")
    assert every.preset.median <= 0.075 and every.preset.p90 <= 0.325, every
    assert every.source is not None and every.source.median <= 0.078 and every.source.p90 <= 0.345, every
    for one in predictions:
        assert set(one.preset.causes) == set(CAUSES) and min(one.preset.causes.values()) >= 0


def test_presets_print_the_bands_of_the_published_rows(predictions: list[PredictedRow]) -> None:
    """The bands of the machines all of whose rows are in the subset."""
    bands = preset_bands(predictions)
    assert set(bands) == set(BANDS)
    assert [bands[name] for name in ("h800_nvlink_ib", "a100_pcie")] == [
        BANDS[name] for name in ("h800_nvlink_ib", "a100_pcie")
    ]
    assert [size_class(size) for size in SIZES] == [0, 1, 2]
    assert "no published measurement" in describe_band("b200_nvlink_ib", 8192) and not describe_band("", 8192)
    plan = ra.make_plan(ra.Causal(), tokens=1 << 16, ranks=8, schedule="ring", dtype="bfloat16")
    preset = ra.MACHINES["h800_nvlink_ib"]
    assert any("16 published passes" in note for note in ra.simulate(plan, preset).notes)
    assert ra.simulate(plan, preset.changed(price=1.0)).notes and not ra.simulate(plan, preset.changed(gamma=0.1)).notes


def test_the_scatter_is_drawn(predictions: list[PredictedRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_scatter(predictions, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".png"}
