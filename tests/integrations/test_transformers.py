"""Models of Hugging Face transformers on real ranks against their eager selves on one device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import model_cases
import sweep
import torch
import transformers
from graph_cases import in_graphs
from packaging.specifiers import SpecifierSet
from packing_cases import FORTY_THREE
from rank_pool import told_by

import ringattn as ra
from ringattn.integrations import supported
from ringattn.integrations import transformers as adapter
from ringattn.integrations.heads import check_pooler, find_pooling

ROOT = Path(__file__).resolve().parents[2]

EPS = 2.0**-23
Run = Callable[..., list[Any]]


#: Cases that compare two ranks with one process, as their docstrings say, their arguments, and the largest difference.
#: transformers takes losses of fp32 logits, also where a model is in fp64.
DIFFERENCES: list[tuple[Callable[..., dict[str, float]], tuple[Any, ...], float]] = [
    (model_cases.agreements, (list(model_cases.MODELS), 61), 16 * EPS),
    *((model_cases.by_length, ("longrope", *how), 32 * EPS) for how in model_cases.CUTS),
    (model_cases.by_length, ("dynamic", "zigzag", "packed"), 32 * EPS),
    (model_cases.by_length, ("yarn, scaled", "zigzag", "padded"), 32 * EPS),
    *((model_cases.losses, (name,), 32 * EPS) for name in model_cases.LOSSES),
    *((model_cases.sequences, how, 1e-5) for how in (("left", "zigzag"), ("right", "layers"))),
    (model_cases.balanced_layers, ("GPT-OSS, sinks",), 32 * EPS),
    (model_cases.dropped, (), 32 * EPS),
    (model_cases.adapters, (), 1e-5),
    (model_cases.routers, (model_cases.ROUTED,), 64 * EPS),
    (model_cases.told_documents, (), 8 * EPS),
    (model_cases.labelled_padding, (), 8 * EPS),
    (model_cases.far_labels, (), 1e-12),
    (model_cases.whole_heads, (), 8 * EPS),
    (model_cases.holes, (), 8 * EPS),
    (model_cases.both_ways, (), 8 * EPS),
    (model_cases.other_inputs, (), 1e-5),
]


@pytest.mark.multi
@pytest.mark.parametrize(("case", "arguments", "bound"), DIFFERENCES, ids=lambda x: getattr(x, "__name__", None))
def test_numbers_are_those_of_one_process(
    run_ranks: Run, case: Callable[..., dict[str, float]], arguments: tuple[Any, ...], bound: float
) -> None:
    for found in run_ranks(case, 2, *arguments, timeout=120):
        assert max(found.values()) <= bound, found


@pytest.mark.multi
def test_layers_of_two_kinds_on_three_ranks(run_ranks: Run) -> None:
    for found in run_ranks(model_cases.agreements, 3, ["Gemma 3, hybrid", "GPT-OSS, sinks"], 61, timeout=120):
        assert max(found.values()) <= 16 * EPS, found


@pytest.mark.multi
@pytest.mark.parametrize("name", ["Gemma 2, softcap", "GPT-OSS, sinks", "Mistral, window"])
def test_padded_and_packed_rows_equal_sequences_alone(run_ranks: Run, name: str) -> None:
    for found in run_ranks(model_cases.batches, 2, name, 32 * EPS, timeout=120):
        assert found == dict.fromkeys(sweep.PARTS, "exact")


@pytest.mark.parametrize(
    ("machine", "ranks", "name"), [("h100_nvlink_ib", 8, "balanced(1)"), ("a100_pcie", 32, "contiguous")]
)
def test_the_first_packed_batch_decides_whether_batches_are_balanced(machine: str, ranks: int, name: str) -> None:
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "schedule": "auto", "machine": machine}
    masks = adapter.LayerMasks((ra.Causal(),), (1,), sizes=tuple(sizes.items()))
    assert masks.cut(ra.Documents(FORTY_THREE), ranks).name == name
    assert masks.cut(ra.Documents([1000] * 128), ranks).name == name


def test_masks_of_layers_are_read_from_the_model() -> None:
    hybrid = adapter.LayerMasks.of(model_cases.make("Gemma 3, hybrid", num_hidden_layers=2))
    assert hybrid == adapter.LayerMasks((ra.Causal() & ra.Window(8), ra.Causal()), (1, 1))
    encoder = adapter.LayerMasks.of(model_cases.make("ModernBERT, two sides", num_hidden_layers=4))
    assert encoder == adapter.LayerMasks((ra.Full(), ra.Full() & ra.Window(5, 5)), (2, 2))
    assert adapter.LayerMasks.of(model_cases.make("Llama")) == adapter.LayerMasks((ra.Causal(),), (2,))


#: Heads of encoders and decoders: packed, padded and checkpointed rows, with each sequence alone; every other kind of
#: batch on 2 ranks, the others on 3.
HEADS = (
    *("BertForTokenClassification", "BertModel", "EuroBertForSequenceClassification"),
    *("RobertaForMaskedLM", "RobertaForSequenceClassification", "ModernBertForSequenceClassification"),
    *("ModernBertForMaskedLM", "LlamaForTokenClassification", "LlamaForSequenceClassification"),
    "LlamaForQuestionAnswering",
)


@pytest.mark.multi
@pytest.mark.parametrize(("half", "name"), [(i % 2, name) for i, name in enumerate(HEADS)])
def test_heads_are_those_of_sequences_alone(run_ranks: Run, half: int, name: str) -> None:
    found = run_ranks(sweep.one, 3, name, 1e-5, None, torch.float32, half, timeout=120)
    assert sweep.verdict(found) == "exact"


@pytest.mark.multi
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "BertForSequenceClassification"])
def test_a_class_in_fp64_is_in_fp64(run_ranks: Run, name: str) -> None:
    for found in run_ranks(sweep.fine, 3, name, timeout=120):
        assert found.pop("made") == "torch.float64" and set(found.values()) == {"exact"}, found


#: Ropes of a model with layers of two kinds, of which one kind depends on the length.
BY_LAYER = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}


def test_a_head_is_asked_what_it_reads() -> None:
    for family, settings, reads in (
        *(
            ("ModernBert", {"classifier_pooling": "cls"}, "first"),
            ("ModernBert", {"classifier_pooling": "mean"}, "mean"),
        ),
        *(("EuroBert", {"classifier_pooling": "bos"}, "first"), ("EuroBert", {"classifier_pooling": "mean"}, "mean")),
        *(("EuroBert", {"classifier_pooling": "late"}, "late"), ("Roberta", {}, "first"), ("GPT2", {}, "last")),
    ):
        config = getattr(transformers, f"{family}Config")(**{**model_cases.BASE, "pad_token_id": 0, **settings})
        head = getattr(transformers, f"{family}ForSequenceClassification")(config)
        assert find_pooling(head, "logits") == reads, (family, settings)


def test_a_rope_is_asked_whether_it_depends_on_the_length() -> None:
    found = {
        name: any(map(supported.rotates_by_length, model_cases.make(name).modules())) for name in model_cases.LENGTHS
    }
    assert found == dict.fromkeys(model_cases.LENGTHS, True)
    with torch.device("meta"):
        by_layer = model_cases.make("Gemma 3, hybrid", rope_parameters=BY_LAYER)
    assert any(map(supported.rotates_by_length, by_layer.modules()))
    plain = ("Llama", "Gemma 3, hybrid", "RoBERTa, positions from 2", "Phimoe, window of the mask")
    assert not any(map(supported.rotates_by_length, (x for name in plain for x in model_cases.make(name).modules())))


@pytest.mark.multi
@pytest.mark.parametrize("case", [model_cases.refusals, model_cases.refused_batches])
def test_what_cannot_be_honoured_is_refused_on_all_ranks_by_name(run_ranks: Run, case: Callable[..., None]) -> None:
    run_ranks(case, 2, timeout=120)


@pytest.mark.multi
@in_graphs
def test_a_compiled_model_is_the_eager_one_and_compiles_twice(run_ranks: Run) -> None:
    for same, compilations in run_ranks(model_cases.compiled, 2, 4, timeout=240):
        assert same and compilations <= 3  # two of the model, one of the hook that scales the loss


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
def test_the_page_of_classes_says_what_the_code_does(run_ranks: Run) -> None:
    page, table = sweep.PAGE.read_text(), sweep.read_table()
    counts = {word: sum(row[1] == word for row in table) for word in sweep.ANSWERS.values()}
    assert f"Of {len(table)} classes and variants 0 are wrong, 0 are crashed, {counts['refused']} are refused" in page
    if f"transformers {transformers.__version__} run" not in page:
        pytest.skip("the page is that of another version of transformers")
    for i, name in enumerate(SAMPLE):
        half = i % 2 if [name, "exact", ""] in table else None  # a refusal names all kinds of batches
        found = run_ranks(sweep.one, 3, name, sweep.BOUND, None, torch.float32, half, timeout=120)
        assert sweep.row(name, sweep.verdict(found)) in table, name


def test_the_page_of_classes_and_the_code_refuse_the_same_classes() -> None:
    """A class for each reason that is known before a model runs; and no exact class is refused."""
    if f"transformers {transformers.__version__} run" not in sweep.PAGE.read_text():
        pytest.skip("the page is that of another version of transformers")
    refused = [
        (name, why)
        for name, answer, why in sweep.read_table()
        if answer == "refused" and name.isidentifier() and why.startswith("has ")
    ]
    by_reason = {re.sub(r"model[.\w]*", "", words): (name, words) for name, words in reversed(refused)}
    assert len(by_reason) > 12
    for name, words in by_reason.values():
        model = sweep.make_empty(name, sweep.classes()[name])
        said = told_by(lambda model=model: (supported.check_model(model), check_pooler(model)))  # type: ignore[misc]
        assert [name, "refused", words] == sweep.row(name, f"refused: {said}")
