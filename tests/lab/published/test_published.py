"""Errors of the timing model on published measurements, as a regression test; their bands; what a row's plan is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ringattn as ra
from ringattn.lab.published import steps
from ringattn.lab.published.errors import (
    SCORED,
    band_of_sources,
    count_left_out,
    errors_by_family,
    judge_choices,
    preset_bands,
)
from ringattn.lab.published.predictions import (
    SOURCES,
    Measurement,
    PredictedRow,
    predict_measurements,
    read_measurements,
    read_table,
)
from ringattn.lab.published.steps import step_errors
from ringattn.machine.bands import (
    BANDS,
    MEMORY,
    SIZES,
    STEPS,
    STEPS_LIBRARIES,
    STEPS_MACHINES,
    STEPS_TOKENS,
    describe_band,
    size_class,
)
from ringattn.machine.presets import PRESETS, TUNING

#: Families that set numbers and have no rows in the file.
ELSEWHERE = {"b200", "l20", "torchtitan-a100"}
#: Most (median, P90) of the errors of presets made without the family, in the fixed subset.
LIMITS = {
    "zhuzilin": (0.06, 0.105),
    "zhuzilin-varlen": (0.035, 0.1),
    "zhuzilin-old": (0.085, 0.105),
    "magi-h100": (0.05, 0.1),
    "usp-a100-nvlink": (0.12, 0.24),
    "usp-a100-pcie": (0.46, 0.64),
    "kernel-h100": (0.07, 0.19),
}


@pytest.fixture(scope="module")
def predictions() -> list[PredictedRow]:
    """A fixed subset, which takes seconds: up to 8 GPUs, and of USP's table on NVLink the rows with 8 heads of 128."""

    def is_chosen(row: Measurement) -> bool:
        return row.gpus <= 8 and (row.family != "usp-a100-nvlink" or (row.heads, row.head_dim) == (8, 128))

    return predict_measurements([row for row in read_measurements() if is_chosen(row)])


def test_every_row_of_the_file_has_a_source_and_a_plan_of_its_flops() -> None:
    rows = read_measurements()
    assert len(rows) == 357 and {row.family for row in rows} == set(SOURCES) - ELSEWHERE
    by_id = {row.id: row for row in rows}
    ring = by_id["zhuzilin-002"]
    assert [plan.layout.name for plan in ring.plans()] == ["zigzag"] and ring.shard == 8192
    # The source's rate: 277.08 TFLOP/s of a GPU.
    assert ring.flops / ring.seconds == pytest.approx(277.08e12, rel=1e-3)


def test_errors_are_those_of_rows_that_set_nothing(predictions: list[PredictedRow]) -> None:
    """Smaller than those of the null model in each family; most of the fitted numbers are seen to be left out."""
    families = errors_by_family(predictions)
    for name, (median, p90) in LIMITS.items():
        unseen, null = families[name]["unseen"], families[name]["null"]
        assert unseen.median <= median and unseen.p90 <= p90, unseen
        assert unseen.median < null.median and unseen.p90 < null.p90, null
    differ = {one.row.family for one in predictions if one.unseen != one.preset}
    assert differ == {"zhuzilin", "zhuzilin-old", "zhuzilin-varlen", "usp-a100-nvlink", "usp-a100-pcie"}


def test_only_families_that_set_no_number_are_scored(predictions: list[PredictedRow]) -> None:
    families = errors_by_family(predictions)
    assert next(iter(families)) == SCORED and TUNING.isdisjoint({"magi-h100", "kernel-h100"})
    assert families[SCORED]["unseen"].rows == sum(one.row.family not in TUNING for one in predictions)
    assert {name for name, errors in families.items() if "in sample" in errors} == TUNING - ELSEWHERE
    assert "b200" in PRESETS["b200_nvlink_ib"].families("cudnn") and "b200" in PRESETS["b300_nvlink_ib"].families(
        "cudnn"
    )
    assert "l20" in PRESETS["l20_pcie"].families("fa2")
    a100, fa4 = PRESETS["a100_pcie"], PRESETS["b200_nvlink_ib"].tuned("fa4")
    assert (
        a100.machine("x", unseen="l20").node_bandwidth == 6e9 and a100.machine("x", unseen="usp-a100-pcie").switch == 1
    )
    assert set(fa4) == {"host", "host_call", "visit"}


def test_fitted_numbers_name_their_families() -> None:
    """Without its family a fitted number is another one; all others stay."""
    for name, preset in PRESETS.items():
        for facts in (preset.values, *preset.kernels.values()):
            for number, fact in facts.items():
                where = name, number
                assert (fact.source == "fitted") == bool(fact.families) == (fact.without is not None), where
                assert set(fact.families) <= set(SOURCES), where
    preset = PRESETS["a100_nvlink_ib"]
    shipped, unseen = preset.machine("x"), preset.machine("x", unseen="usp-a100-nvlink")
    assert (shipped.host, unseen.host) == (4e-4, 3e-4) and shipped.node_bandwidth == unseen.node_bandwidth
    visits = [preset.machine("x", unseen=name).kernel_rates for name in ("", "zhuzilin")]
    assert visits[0] != visits[1]


def test_choices_lose_the_time_between_the_predicted_and_the_measured_best(predictions: list[PredictedRow]) -> None:
    scored = judge_choices(one for one in predictions if one.row.family not in TUNING)
    made = judge_choices(predictions)
    assert scored["count"] < made["count"] == 20 and scored["mean"] <= 0.03 < scored["null"]
    assert made["mean"] <= 0.05 < made["null"]
    first, second = predictions[:2]  # a ring and a zigzag ring of one table
    pair = [first, second]
    best = min(pair, key=lambda one: one.row.seconds)
    (worse,) = (one for one in pair if one is not best)
    lost = worse.row.seconds / best.row.seconds - 1
    assert judge_choices(pair)["mean"] == 0.0 and judge_choices(pair)["null"] == pytest.approx(lost / 2)
    swapped = [replace(first, unseen=second.unseen), replace(second, unseen=first.unseen)]
    assert judge_choices(swapped)["mean"] == pytest.approx(lost)


def test_presets_print_the_bands_of_the_published_rows(predictions: list[PredictedRow]) -> None:
    """The bands of the machines all of whose rows are in the subset; they hold the numbers beside which they stand."""
    bands = preset_bands(predictions)
    assert set(bands) == set(BANDS)
    whole = (("h800_nvlink_ib", "fa2"), ("a100_pcie", "fa2"), ("h100_nvlink_ib", "triton"))
    assert all(bands[name] == BANDS[name] for name in whole)
    for name, index in (("h800_nvlink_ib", 1), ("a100_pcie", 0), ("a100_pcie", 2)):
        band, rows = BANDS[name, "fa2"][index], [one for one in predictions if one.row.machine == name]
        ratios = [one.row.seconds / one.preset for one in rows if size_class(one.row.shard) == index]
        assert band is not None and band.rows == len(ratios) == band.seen
        assert 0.9 * len(ratios) <= sum(band.low <= ratio <= band.high for ratio in ratios)
    assert [size_class(size) for size in SIZES] == [0, 1, 2]
    told = describe_band("b200_nvlink_ib", "cudnn", 8192)
    assert "no published measurement" in told and "backward" in told and " b200" in told
    assert not describe_band("", "", 8192) and describe_band("cpu", "", 8192).endswith("no published measurement")
    assert "none of these set" in describe_band("h100_nvlink_ib", "fa3", 8192)
    assert "no published measurement" in describe_band("h100_nvlink_ib", "fa2", 8192)  # no row of this kernel
    plan = ra.make_plan(ra.Causal(), tokens=1 << 16, ranks=8, schedule="ring", dtype="bfloat16")
    preset = ra.MACHINES["h800_nvlink_ib"]
    assert any("16 published passes" in note for note in ra.simulate(plan, preset).notes)
    assert ra.simulate(plan, preset.changed(price=1.0)).notes and not ra.simulate(plan, preset.changed(gamma=0.1)).notes


def test_steps_of_training_are_as_far_as_the_model_says() -> None:
    errors, ratios = step_errors()
    *groups, everything = errors.values()
    speed = everything["tokens/s"]
    assert sum(one["tokens/s"].rows for one in groups) == speed.rows == 81 and len(errors) == 7
    assert {kind: band_of_sources(x) for kind, x in ratios.items()} == {"seconds": STEPS, "reserved": MEMORY}
    assert sum(held for held, _ in count_left_out(ratios["seconds"]).values()) >= 0.85 * speed.rows
    assert {one["library"] for one in steps.SOURCES.values()} == {*STEPS_LIBRARIES}
    presets = {f"{row['gpu']}_nvlink_ib" for row in read_table("steps.csv")}
    assert presets | {"h100_500w_ib"} == {*STEPS_MACHINES}
    assert max(int(row["seq"]) for row in read_table("steps.csv")) == STEPS_TOKENS
    assert all(one["tokens/s"].median < one["null"].median for one in errors.values())
    assert speed.median <= 0.1 and speed.p90 <= 0.25 and abs(speed.bias) <= 0.05
    assert everything["reserved"].median <= 0.2


def test_no_step_that_fitted_needs_more_than_its_peak() -> None:
    rows = [row for row in read_table("steps.csv") if row["peak_GiB"]]
    assert len(rows) == 22
    for row in rows:
        told = steps.predict(row)
        assert told["needed"] <= float(row["peak_GiB"]) and told["needed"] < told["reserved"], row["run"]
