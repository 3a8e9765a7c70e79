"""Models of Hugging Face transformers on real ranks against their eager selves on one device."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import model_cases
import sweep
from graph_cases import in_graphs
from packaging.specifiers import SpecifierSet

import ringattn as ra
from ringattn.integrations import transformers as adapter

ROOT = Path(__file__).resolve().parents[2]

EPS = 2.0**-23


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_and_gradients_are_those_of_the_eager_model(run_ranks, ranks: int) -> None:  # type: ignore[no-untyped-def]
    names = list(model_cases.MODELS) if ranks == 2 else ["Gemma 3, hybrid", "GPT-OSS, sinks"]
    for found in run_ranks(model_cases.agreements, ranks, names, 61, timeout=120):
        for name, (logits, gradients) in zip(names, found, strict=True):
            assert logits <= 16 * EPS and gradients <= 16 * EPS, name


@pytest.mark.multi
@pytest.mark.parametrize("name", ["Gemma 2, softcap", "GPT-OSS, sinks", "Mistral, window"])
def test_padded_and_packed_rows_equal_sequences_alone(run_ranks, name: str) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.batches, 2, name, 32 * EPS, timeout=120):
        assert found == dict.fromkeys(("packed", "padded", "checkpointed"), "exact")


@pytest.mark.multi
def test_batches_are_cut_for_the_masks_of_all_layers_and_their_own_documents(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found, layouts in run_ranks(model_cases.balanced_layers, 2, "GPT-OSS, sinks", timeout=120):
        assert max(found) <= 32 * EPS and layouts == 3


def test_masks_of_layers_are_read_from_the_model() -> None:
    hybrid = adapter.LayerMasks.of(model_cases.make("Gemma 3, hybrid", num_hidden_layers=2))
    assert hybrid == adapter.LayerMasks((ra.Causal() & ra.Window(8), ra.Causal()), (1, 1))
    encoder = adapter.LayerMasks.of(model_cases.make("ModernBERT, two sides", num_hidden_layers=4))
    assert encoder == adapter.LayerMasks((ra.Full(), ra.Full() & ra.Window(5, 5)), (2, 2))
    assert adapter.LayerMasks.of(model_cases.make("Llama")) == adapter.LayerMasks((ra.Causal(),), (2,))


@pytest.mark.multi
@pytest.mark.parametrize("name", list(model_cases.LENGTHS))
@pytest.mark.parametrize(("layout", "kind"), [("contiguous", "plain"), ("zigzag", "packed"), ("zigzag", "padded")])
def test_rope_takes_the_length_of_the_whole_batch(run_ranks, name: str, layout: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.by_length, 2, name, layout, kind, timeout=120):
        assert max(found) <= 32 * EPS


@pytest.mark.multi
@pytest.mark.parametrize("name", list(model_cases.LOSSES))
def test_the_mean_over_ranks_is_the_loss_where_one_rank_has_no_label(run_ranks, name: str) -> None:  # type: ignore[no-untyped-def]
    for loss, gradients in run_ranks(model_cases.losses, 2, name, timeout=120):
        assert loss <= 32 * EPS and gradients <= 32 * EPS


@pytest.mark.multi
def test_attention_dropout_does_not_depend_on_the_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for logits, gradients, effect in run_ranks(model_cases.dropped, 2, timeout=120):
        assert logits <= 32 * EPS and gradients <= 32 * EPS and effect > 1e-3


@pytest.mark.multi
def test_what_cannot_be_honoured_is_refused_on_all_ranks_by_name(run_ranks) -> None:  # type: ignore[no-untyped-def]
    run_ranks(model_cases.refusals, 2, timeout=120)


@pytest.mark.multi
@in_graphs
def test_a_compiled_model_is_the_eager_one_and_compiles_twice(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for same, compilations in run_ranks(model_cases.compiled, 2, 10, timeout=240):
        assert same and compilations <= 3  # two of the model, one of the hook that scales the loss


@pytest.mark.multi
def test_batches_that_cannot_be_cut_and_a_config_of_two_models(run_ranks) -> None:  # type: ignore[no-untyped-def]
    run_ranks(model_cases.refused_batches, 2, timeout=120)


#: What transformers passes to attention functions and reads from the result, and what `_attend` may leave unread.
READ = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "cu_seq_lens_q"}
UNREAD = {"deterministic", "encoder_hidden_states", "output_router_logits", "position_ids", "use_cache"}
#: The same of mask functions and `_write_mask`, which leaves out what it reads from `mask_function`.
MASK_READ = {"attention_mask", "batch_size", "device", "local_size", "mask_function"}
MASK_UNREAD = {
    "q_length", "kv_length", "q_offset", "kv_offset", "allow_is_causal_skip", "allow_is_bidirectional_skip", "dtype",
    "config", "use_vmap",
}  # fmt: skip


def test_the_interface_of_transformers_has_not_moved() -> None:
    """A new keyword may change what attention means: read it, then handle it or add it to the sets above."""
    attention, masks = model_cases.passed_keywords()
    assert attention >= READ and masks >= MASK_READ, (READ - attention, MASK_READ - masks)
    assert attention <= READ | UNREAD, attention - READ - UNREAD
    assert masks <= MASK_READ | MASK_UNREAD, masks - MASK_READ - MASK_UNREAD
    named = set(inspect.signature(adapter._attend).parameters)
    assert named >= READ and set(inspect.signature(adapter._write_mask).parameters) >= MASK_READ
    (tested,) = set(re.findall(r'"transformers(>=[^"]+)"', (ROOT / "pyproject.toml").read_text()))
    assert SpecifierSet(tested).contains(version("transformers")), f"{version('transformers')} is not in {tested}"


#: Options of examples/hf_finetune in the tests: the micro-batches of a step have different numbers of labels.
SMALL = ("--steps", "6", "--longest", "96", "--accumulate", "2")


def series(log: list[dict[str, float]]) -> list[float]:
    """Losses, gradient norms and the loss of the evaluation in a log of the Trainer."""
    return [line[key] for key in ("loss", "grad_norm", "eval_loss") for line in log if key in line]


@pytest.mark.multi
@pytest.mark.timeout(300)
def test_the_trainer_on_dp_x_cp_ranks_is_the_trainer_of_one_process(run_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    words = (*SMALL, "--output", str(tmp_path))
    alone, _, _ = model_cases.trained(0, *words)
    whole = series(alone)
    assert len(whole) == 13
    for more, kind in (((), "Parameter"), (("--fsdp",), "DTensor")):
        for log, found, left in run_ranks(model_cases.trained, 4, *words, "--dp", "2", "--cp", "2", *more, timeout=280):
            assert series(log) == pytest.approx(whole, rel=1e-5)
            assert found == kind and left == 0  # DDP as the last holder of its group would hang at exit
    naive = run_ranks(model_cases.trained, 4, *words, "--dp", "2", "--cp", "2", "--mean-of-means", timeout=280)
    for log, _, _ in naive:
        differences = [abs(a - b) / b for a, b in zip(series(log), whole, strict=True)]
        assert max(differences[:6]) > 1e-4 and max(differences[6:12]) > 1e-4  # losses, gradient norms


#: A class for each way in which models differ, and the begin of what the sweep says about it.
SAMPLE = {
    "AfmoeForCausalLM": "exact",
    "ModernBertForTokenClassification": "exact",
    "OPTModel": "exact",
    "PhimoeForCausalLM": "exact",
    "Qwen2MoeForCausalLM": "exact",
    "CLIPTextModel": "refused: Unsupported: CLIPTextModel returns a tuple (return_dict=False), or a pooler_output",
    "DogeForCausalLM": "refused: Unsupported: DogeForCausalLM has a mask made of its values",
    "MobileBertForMaskedLM": "refused: Unsupported: MobileBertForMaskedLM has embeddings of neighbouring tokens",
    "NemotronForCausalLM": "refused: Unsupported: NemotronAttention is not given cu_seq_lens_q",
    "Qwen2ForQuestionAnswering": "refused: Unsupported: Qwen2ForQuestionAnswering has a head that reads whole",
}


@pytest.mark.multi
@pytest.mark.timeout(240)
def test_accepted_models_are_exact_and_others_refused_by_name(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for name, words in SAMPLE.items():
        assert sweep.verdict(run_ranks(sweep.one, 3, name, timeout=120)).startswith(words), name
