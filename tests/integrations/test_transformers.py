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
@pytest.mark.parametrize(
    ("name", "checkpointing", "packed"),
    [("Gemma 2, softcap", False, False), ("GPT-OSS, sinks", True, False), ("Mistral, window", True, True)],
)
def test_padded_and_packed_rows_equal_sequences_alone(  # type: ignore[no-untyped-def]
    run_ranks, name: str, checkpointing: bool, packed: bool
) -> None:
    for logits, gradients in run_ranks(model_cases.batches, 2, name, checkpointing, packed, timeout=120):
        assert logits <= 32 * EPS and gradients <= 32 * EPS


@pytest.mark.multi
def test_what_cannot_be_honoured_is_refused_on_all_ranks_by_name(run_ranks) -> None:  # type: ignore[no-untyped-def]
    words = {
        "off by one": "Mismatch: the parallelized model is not its eager self",
        "short": "InvalidInput: check: a window of 9 keys hides nothing",
        "dropout": "Unsupported: attention_dropout=0.1",
        "positions": "InvalidInput: position_ids is missing",
        "moved": "position_ids of rank 1 are not those of its rows under layout 'zigzag' of 40 tokens",
        "on one rank": "position_ids is missing",
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
