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
import transformers
from graph_cases import in_graphs
from packaging.specifiers import SpecifierSet
from rank_pool import told_by

import ringattn as ra
from ringattn.integrations import supported
from ringattn.integrations import transformers as adapter
from ringattn.integrations.heads import check_pooler, find_pooling

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
        assert found == dict.fromkeys(sweep.PARTS, "exact")


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
def test_adapters_of_peft_are_those_of_one_process(run_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.adapters, 2, str(tmp_path), timeout=120):
        assert max(found.values()) <= 1e-5, found


@pytest.mark.multi
def test_the_loss_of_routers_is_that_of_the_rows_of_all_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.routers, 2, model_cases.ROUTED, timeout=120):
        assert max(found.values()) <= 64 * EPS, found


#: Heads of encoders and decoders: compared on 2 and 3 ranks, packed, padded and checkpointed, with each sequence alone.
HEADS = (
    *("BertForTokenClassification", "BertForSequenceClassification", "BertModel", "EuroBertForSequenceClassification"),
    *("RobertaForMaskedLM", "RobertaForSequenceClassification", "ModernBertForSequenceClassification"),
    *("ModernBertForMaskedLM", "LlamaForTokenClassification", "LlamaForSequenceClassification"),
    "LlamaForQuestionAnswering",
)


@pytest.mark.multi
@pytest.mark.parametrize("name", HEADS)
def test_heads_are_those_of_sequences_alone(run_ranks, name: str) -> None:  # type: ignore[no-untyped-def]
    assert sweep.verdict(run_ranks(sweep.one, 3, name, 1e-5, timeout=120)) == "exact"


@pytest.mark.multi
@pytest.mark.parametrize(("side", "layout"), [("left", "zigzag"), ("right", "layers")])
def test_losses_of_rewards_and_embeddings(run_ranks, side: str, layout: str) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.sequences, 2, side, layout, timeout=120):
        assert max(found) <= 1e-5


@pytest.mark.multi
def test_documents_that_masks_and_positions_tell_are_those_alone(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.told_documents, 2, timeout=120):
        assert max(found.values()) <= 8 * EPS, found  # transformers takes losses of fp32 logits


@pytest.mark.multi
def test_whole_batches_with_labels_on_padding_have_the_loss_of_one_process(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found, told in run_ranks(model_cases.labelled_padding, 2, timeout=120):
        assert max(found.values()) <= 8 * EPS, found  # transformers takes losses of fp32 logits
        assert told.startswith("Unsupported: labels of rows of padding: attn_implementation='eager'")


@pytest.mark.multi
def test_labels_and_weights_any_distance_on_stay_within_documents(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.far_labels, 2, timeout=120):
        assert len(found) == 3 and max(found.values()) <= 1e-12, found


@pytest.mark.multi
def test_embeddings_types_and_positions_on_three_and_four_axes(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(model_cases.other_inputs, 2, timeout=120):
        assert max(found) <= 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "reads"),
    [
        ("ModernBert", {"classifier_pooling": "cls"}, "first"),
        ("ModernBert", {"classifier_pooling": "mean"}, "mean"),
        ("EuroBert", {"classifier_pooling": "bos"}, "first"),
        ("EuroBert", {"classifier_pooling": "mean"}, "mean"),
        ("EuroBert", {"classifier_pooling": "late"}, "late"),
        ("Roberta", {}, "first"),
        ("GPT2", {}, "last"),
    ],
)
def test_a_head_is_asked_what_it_reads(family: str, settings: dict[str, str], reads: str) -> None:
    config = getattr(transformers, f"{family}Config")(**model_cases.BASE, pad_token_id=0, **settings)
    assert find_pooling(getattr(transformers, f"{family}ForSequenceClassification")(config), "logits") == reads


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


#: A class for each way in which models differ.
SAMPLE = (
    *("AfmoeForCausalLM", "ModernBertForTokenClassification", "OPTModel", "PhimoeForCausalLM", "BartModel"),
    *("Qwen2VLModel", "Qwen2VLModel.get_decoder()", "CLIPTextModel", "DogeForCausalLM", "NemotronForCausalLM"),
)


@pytest.mark.multi
@pytest.mark.timeout(240)
def test_the_page_of_classes_says_what_the_code_does(run_ranks) -> None:  # type: ignore[no-untyped-def]
    page = sweep.PAGE.read_text()
    assert "## Wrong" not in page and "0 are wrong" in page
    if f"transformers {transformers.__version__} tiny" not in page:
        pytest.skip("the page is that of another version of transformers")
    for name in SAMPLE:
        assert sweep.row(name, sweep.verdict(run_ranks(sweep.one, 3, name, timeout=120))) in page, name


def test_the_page_of_classes_and_the_code_refuse_the_same_classes() -> None:
    """A class for each reason that is known before a model runs; and no exact class is refused."""
    page = sweep.PAGE.read_text()
    if f"transformers {transformers.__version__} tiny" not in page:
        pytest.skip("the page is that of another version of transformers")
    refused = re.findall(r"^\| (\w+) \| (has .*) \|$", page.split("## Refused")[1].split("## ")[0], re.MULTILINE)
    by_reason = {re.sub(r"model[.\w]*", "", words): (name, words) for name, words in reversed(refused)}
    assert len(by_reason) > 12
    for name, words in by_reason.values():
        model = sweep.make_empty(name, sweep.classes()[name])
        said = told_by(lambda model=model: (supported.check_model(model), check_pooler(model)))  # type: ignore[misc]
        assert f"| {name} | {words} |\n" == sweep.row(name, f"refused: {said}")
