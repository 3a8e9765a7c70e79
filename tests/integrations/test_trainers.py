"""Trainers of transformers and TRL, and accelerate, over ranks: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_cases

#: Steps of a test, of which the second depends on the first; `steps=20` was run by hand.
STEPS = {"steps": 2}
PACKED = {"packing": True, "max_length": 64, **STEPS}
FREE = {"padding_free": True, "max_length": None, "accumulate": 2, "family": "experts", **STEPS}
Cases = list[tuple[str, dict[str, Any]]]
GROUPS: Cases = [
    *(("sft", PACKED), ("sft", FREE), ("plain", {"data": "dispatch", **STEPS})),
    *(("sft", {"family": "hybrid", **STEPS}), ("plain", {"hybrid": True, **STEPS})),
    *((kind, STEPS) for kind in ("dpo", "grpo", "reward")),
    *(("classes", {"accumulate": 2, "single": x, **STEPS}) for x in (True, False)),
    ("loop", {"classes": True, **STEPS}),
    ("grpo", {"name": "RLOO", **STEPS}),
]
ADAPTERS: Cases = [
    ("plain", {"lora": True, "resume": True, **STEPS}),
    *((kind, {"lora": True, **STEPS}) for kind in ("sft", "dpo", "grpo")),
]
SHARED: Cases = [
    ("plain", {"accumulate": 2, "resume": True, **STEPS}),
    ("plain", {"accumulate": 2, "fsdp": True, **STEPS}),
    ("plain", {"data": "stream", **STEPS}),
    ("loop", STEPS),
]


@pytest.mark.multi
@pytest.mark.parametrize(("dp", "cp", "cases"), [(1, 2, GROUPS), (1, 2, ADAPTERS), (2, 2, SHARED)])
def test_a_trainer_has_the_numbers_of_one_process(run_ranks, tmp_path: Path, dp: int, cp: int, cases: Cases) -> None:  # type: ignore[no-untyped-def]
    alone = trainer_cases.run_all(0, cases, f"{tmp_path}/alone", 1, 1)
    for found in run_ranks(trainer_cases.run_all, dp * cp, cases, f"{tmp_path}/ranks", dp, cp, timeout=170):
        for case, numbers, expected in zip(cases, found, alone, strict=True):
            assert numbers.keys() == expected.keys() and {"loss", "grad_norm"} < expected.keys(), case
            for name, values in expected.items():
                assert numbers[name] == pytest.approx(values, rel=1e-6, abs=1e-7), (case, name)


@pytest.mark.multi
@pytest.mark.parametrize("balanced", [False, True])
def test_the_last_rows_of_a_sequence_have_their_logits_and_gradients(run_ranks, balanced: bool) -> None:  # type: ignore[no-untyped-def]
    for differences in run_ranks(trainer_cases.rows_of_logits, 2, balanced):
        assert max(differences) < 2e-5, differences


@pytest.mark.multi
def test_programs_that_would_be_wrong_are_refused(run_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = [
        "InvalidInput: cp=3 does not divide the 2 ranks",
        "Unsupported: train_sampling_strategy='batch_rebalance' splits data by rank",
        "Unsupported: torch_compile=True is not supported on ranks that share",
        "InvalidInput: cp=3 does not divide the 2 ranks",
        "Unsupported: output_attentions=True",
        "Unsupported: logits_to_keep=tensor",
        "Unsupported: logits_to_keep=1: give the number of last rows to keep",
        "InvalidInput: a call with whole sequences needs input_ids",
        "Mismatch: input_ids of the whole batch differ between rank 0 and rank 1",
    ]
    for said in run_ranks(trainer_cases.refusals, 2, str(tmp_path)):
        for found, expected in zip(said, words, strict=True):
            assert found.startswith(expected), found


@pytest.mark.multi
def test_ranks_drop_units_of_their_own_and_share_the_other_random_numbers(run_ranks) -> None:  # type: ignore[no-untyped-def]
    (first, after), (second, also) = run_ranks(trainer_cases.dropped_units, 2)
    calls = [first[:32], first[32:], second[:32], second[32:]]
    assert len(set(map(tuple, calls))) == 4 and all(map(any, calls))
    assert after == also
