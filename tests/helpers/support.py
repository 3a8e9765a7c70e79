"""What is asserted where: the table of docs/support.md, each cell by the test that asserts it.

`python tests/helpers/support.py` writes the page again.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"
COLUMNS = ("one device", "virtual ranks", "Gloo ranks", "MPI ranks", "CUDA, emulated")

MATRIX = "runtime/test_matrix.py::test_cell"
GLOO = "transport/test_gloo.py::test_gloo_equals_virtual_and_the_plan"
MPI = "transport/test_mpi.py::test_mpi_equals_virtual_and_the_plan"
CUDA = "kernels/test_emulated_cuda.py::test_virtual_rings"
MODELS = "integrations/test_transformers.py::test_logits_and_gradients_are_those_of_the_eager_model"
REFUSED = "refused "

#: By feature and column: the test that asserts it, after `REFUSED` the test of the error, or "" where nothing says so.
SUPPORT: dict[str, tuple[str, str, str, str, str]] = {
    "causal, windows, documents, strided, first tokens": (MATRIX, MATRIX, GLOO, MPI, CUDA),
    "dilated, LongNet, branches": (MATRIX, MATRIX, GLOO, MPI, CUDA),
    "block tables and families": (
        "nn/test_factories.py::test_families_and_presets",
        "runtime/test_properties.py::test_random_problems_equal_the_oracle",
        "",
        "",
        CUDA,
    ),
    "contiguous, zigzag, striped, balanced shards, uneven": (
        "",
        MATRIX,
        "transport/test_gloo.py::test_balanced_shards_on_real_ranks",
        MPI,
        CUDA,
    ),
    "ring, direct, all-gather, double ring, Ulysses": ("", MATRIX, GLOO, MPI, CUDA),
    "gradients where keys travel, and where queries travel": ("", MATRIX, GLOO, MPI, CUDA),
    "grouped heads": (MATRIX, MATRIX, GLOO, MPI, CUDA),
    "values of another width": (
        "runtime/test_matrix.py::test_kernels_and_value_dims",
        "runtime/test_matrix.py::test_kernels_and_value_dims",
        "",
        "",
        CUDA,
    ),
    "fp64": (MATRIX, MATRIX, GLOO, MPI, REFUSED + "kernels/test_kernels.py::test_a_name_is_never_replaced"),
    "fp32, bf16, fp16": (MATRIX, MATRIX, GLOO, MPI, CUDA),
    "lse and its gradient": (
        "runtime/test_properties.py::test_gradients_of_lse_alone_and_of_nothing",
        MATRIX,
        GLOO,
        MPI,
        CUDA,
    ),
    "padding of keys": (
        "runtime/test_padding.py::test_equals_the_oracle",
        "runtime/test_padding.py::test_equals_the_oracle",
        "transport/test_gloo.py::test_multihead_modules_on_shards_equal_one_device",
        "",
        "",
    ),
    "learned sinks": (
        "runtime/test_sinks.py::test_equals_dense_softmaxes",
        "runtime/test_sinks.py::test_equals_dense_softmaxes",
        MODELS,
        "",
        "",
    ),
    "softcap (kernel reference)": (
        "runtime/test_sinks.py::test_equals_dense_softmaxes",
        "runtime/test_sinks.py::test_equals_dense_softmaxes",
        MODELS,
        "",
        REFUSED + "runtime/test_sinks.py::test_errors_say_what_to_try",
    ),
    "dropout of attention weights (kernel reference)": (
        "runtime/test_dropout.py::test_one_device_streams_and_small_calls",
        "runtime/test_dropout.py::test_equals_a_dense_softmax_whatever_the_ranks",
        "runtime/test_dropout.py::test_real_ranks",
        "",
        "",
    ),
    "rows of a batch with documents of their own": (
        "runtime/test_rows.py::test_rows_equal_dense_masks_of_each_row",
        "runtime/test_rows.py::test_rows_equal_dense_masks_of_each_row",
        "integrations/test_transformers.py::test_padded_and_packed_rows_equal_sequences_alone",
        "",
        "",
    ),
    "messages rounded to 16 bits": (
        "",
        "runtime/test_properties.py::test_what_travels_may_be_rounded",
        "",
        "",
        CUDA,
    ),
    "Every row that sees a NaN is NaN": (
        "runtime/test_bad_numbers.py::test_every_row_that_sees_a_nan_is_nan",
        "runtime/test_bad_numbers.py::test_every_row_that_sees_a_nan_is_nan",
        "",
        "",
        "kernels/test_emulated_cuda.py::test_bad_numbers_on_emulated_ops",
    ),
    "longer than the device's memory": (
        "runtime/test_offload.py::test_equals_the_oracle",
        "",
        "",
        "",
        "runtime/test_offload.py::test_on_a_cuda_device",
    ),
    "gradient checkpointing": (
        "runtime/test_memory.py::test_checkpoints_have_equal_gradients",
        "runtime/test_memory.py::test_checkpoints_have_equal_gradients",
        MODELS,
        "",
        "",
    ),
    "torch.compile without a graph break": (
        "runtime/test_graph_op.py::test_compiled_calls_are_eager_ones",
        "runtime/test_graph_op.py::test_compiled_calls_are_eager_ones",
        "nn/test_ranks.py::test_compiled_calls_keep_their_order_on_all_ranks",
        "",
        "",
    ),
    "autocast, copies, pickles": (
        "nn/test_copies.py::test_results_under_autocast_have_its_dtype",
        "nn/test_copies.py::test_copies_compute_the_same",
        "",
        "",
        "",
    ),
    "FSDP2, mixed precision": ("", "", "nn/test_ranks.py::test_mixed_precision_of_fsdp", "", ""),
    "the loss over all ranks": (
        "train/test_loss.py::test_chunks_do_not_change_the_loss",
        "",
        "train/test_loss.py::test_the_mean_over_ranks_is_the_loss_of_all_tokens",
        "",
        "",
    ),
    "modules": (
        "nn/test_nn.py::test_equals_torch",
        "nn/test_nn.py::test_virtual_ranks_equal_one_device",
        "transport/test_gloo.py::test_multihead_modules_on_shards_equal_one_device",
        "",
        "runtime/test_fake_cuda.py::test_a_module_stays_on_the_device",
    ),
    "learned selection of blocks": (
        "nn/test_adaptive.py::test_equals_one_dense_softmax",
        "nn/test_adaptive.py::test_equals_one_dense_softmax",
        "runtime/test_handshake.py::test_exceptions_in_an_adaptive_module",
        "",
        "",
    ),
    "Hugging Face models": ("", "", MODELS, "", ""),
    "a mistake on one rank is an error on all": (
        "",
        "",
        "transport/test_gloo.py::test_every_rank_is_told_before_the_first_message",
        "transport/test_mpi.py::test_every_rank_is_told_before_the_first_message",
        "transport/test_torchdist.py::test_all_ranks_connect_nccl_before_the_first_message",
    ),
    "double backward": (
        REFUSED + "runtime/test_properties.py::test_double_backward_is_refused",
        REFUSED + "runtime/test_properties.py::test_double_backward_is_refused",
        "",
        "",
        "",
    ),
}

INTRODUCTION = """# What is tested where

Each word links to the file of the test that asserts it; a test that goes away takes its word with it. "Virtual ranks"
run the program of every rank in one process. "CUDA, emulated" runs the CUDA paths on stand-ins of PyTorch's operators
with their refusals, layouts and misreadings: no GPU has run them. An empty cell says that no test looks at this pair,
not that it fails. "refused" is an error that says what to try; a double backward is refused by torch.
`tests/helpers/support.py` holds the table and writes this page.
"""


@cache
def _tests(file: str) -> frozenset[str]:
    """The names of the test functions of a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def missing_tests() -> list[str]:
    """The tests that the table names and that do not exist."""
    named = {cell.removeprefix(REFUSED) for row in SUPPORT.values() for cell in row if cell}
    pairs = sorted(cell.split("::") for cell in named)
    return [
        f"{file}::{name}" for file, name in pairs if not (ROOT / "tests" / file).exists() or name not in _tests(file)
    ]


def render() -> str:
    """The page as Markdown."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for feature, row in SUPPORT.items():
        cells = []
        for cell in row:
            word = "refused" if cell.startswith(REFUSED) else "asserted"
            file = cell.removeprefix(REFUSED).split("::")[0]
            cells.append(f"[{word}](../tests/{file})" if cell else "")
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
