"""Models of Hugging Face transformers on real ranks against their eager selves on one device."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import model_cases

EPS = 2.0**-23


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_gradients_are_those_of_the_eager_model(run_ranks, ranks: int) -> None:  # type: ignore[no-untyped-def]
    names = list(model_cases.MODELS) if ranks == 2 else ["Gemma 3, hybrid", "GPT-OSS, sinks"]
    for found in run_ranks(model_cases.agreements, ranks, names, 61, timeout=120):
        for name, (logits, gradients) in zip(names, found, strict=True):
            assert logits <= 16 * EPS and gradients <= 16 * EPS, name


@pytest.mark.multi
@pytest.mark.parametrize(("name", "checkpointing"), [("Gemma 2, softcap", False), ("GPT-OSS, sinks", True)])
def test_padded_rows_equal_rows_alone(run_ranks, name: str, checkpointing: bool) -> None:  # type: ignore[no-untyped-def]
    for logits, gradients in run_ranks(model_cases.padded, 2, name, checkpointing, timeout=120):
        assert logits <= 32 * EPS and gradients <= 32 * EPS


@pytest.mark.multi
def test_attention_dropout_does_not_depend_on_the_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for logits, gradients, effect in run_ranks(model_cases.dropped, 2, timeout=120):
        assert logits <= 32 * EPS and gradients <= 32 * EPS and effect > 1e-3


@pytest.mark.multi
def test_what_cannot_be_honoured_is_refused_on_all_ranks_by_name(run_ranks) -> None:  # type: ignore[no-untyped-def]
    words = {
        "off by one": "Mismatch: the parallelized model is not its eager self",
        "short": "InvalidInput: check: a window of 9 keys hides nothing",
        "dropout": "Unsupported: kernel aten_cpu has no dropout",
        "positions": "InvalidInput: position_ids is missing",
        "generate": "Unsupported: generate() of a parallelized model",
        "group": "InvalidInput: group=2: expected a ProcessGroup",
        "layers": "layers of type chunked_attention",
        "router": "auxiliary loss of its routers",
        "option": "unknown option 'softcap'",
        "alibi": "BloomForCausalLM has attention outside",
    }
    for found in run_ranks(model_cases.refusals, 2, timeout=120):
        for name, text in words.items():
            assert text in found[name], name


@pytest.mark.multi
def test_a_compiled_model_is_the_eager_one_and_compiles_twice(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for same, compilations in run_ranks(model_cases.compiled, 2, 10, timeout=240):
        assert same and compilations <= 2
