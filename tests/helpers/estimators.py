"""What other estimators say beside this model: prints the tables of docs/simulation.md, by releases that are unpacked.

`python estimators.py FOLDER PYTHON`: in FOLDER, the files of megatron-core 0.19.2 and deepspeed 0.19.8; PYTHON has
aiconfigurator 0.12.0.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ringattn.lab.models.config import ModelConfig, load_model
from ringattn.lab.models.inference import decode, prefill
from ringattn.lab.models.parallel import Parallel
from ringattn.lab.published.predictions import read_table
from ringattn.lab.published.steps import predict
from ringattn.machine.presets import get_machine

#: Runs of steps.csv with one tensor-parallel rank, whose sizes all estimators of training can state.
RUNS = (
    *("T1 8B 8xH100 FSDP eager sel-AC", "T3 8B 128 FSDP+compile", "T2 8B 8 fp8 CP1 32768", "T2 8B 8 fp8 CP2 65536"),
    *("T2 8B 8 fp8 CP4 131072", "T2 8B 8 fp8 CP8 262144", "8B 1 dp1 tp1", "8B 4 dp4 tp1", "13B 8 FSDP8"),
    "Trainy 8B 32 H200 fp8",
)
#: (GPU, model, phase, tokens, sequences, tensor-parallel ranks) of prefills and decodes.
SERVING = (
    ("h100", "llama3_8b", "prefill", 8192, 1, 1),
    ("h100", "llama3_8b", "prefill", 32768, 1, 1),
    ("h100", "llama3_8b", "prefill", 131072, 1, 1),
    ("a100", "llama3_8b", "prefill", 32768, 1, 1),
    ("b200", "llama3_8b", "prefill", 32768, 1, 1),
    ("h100", "llama3_70b", "prefill", 8192, 1, 8),
    ("h100", "llama3_70b", "prefill", 131072, 1, 8),
    ("h100", "llama3_8b", "decode", 32768, 16, 1),
    ("h200", "llama3_70b", "decode", 32768, 16, 8),
    ("h200", "gpt_oss_120b", "decode", 32768, 32, 8),
)
#: Run by the other Python: [ms by each engine, "" where it has no data] of each configuration.
THEIRS = """
import json, logging, sys
logging.disable(logging.WARNING)
from aiconfigurator.cli.api import cli_estimate
names = {"llama3_8b": "meta-llama/Meta-Llama-3.1-8B", "llama3_70b": "meta-llama/Meta-Llama-3.1-70B"}
for gpu, model, phase, tokens, batch, tp in json.loads(sys.argv[1]):
    found = []
    for engine in ("trtllm", "vllm", "sglang"):
        sizes = dict(isl=tokens, osl=1 if phase == "prefill" else 8, batch_size=batch, tp_size=tp, backend_name=engine)
        sizes |= dict(moe_ep_size=1, moe_tp_size=tp) if model not in names else {}
        mode = "static_ctx" if phase == "prefill" else "static_gen"
        try:
            one = cli_estimate(names.get(model, "openai/gpt-oss-120b"), gpu + "_sxm", mode=mode, **sizes)
            found.append(one.ttft if phase == "prefill" else one.tpot)
        except RuntimeError as error:
            assert "data missing" in str(error), error
            found.append("")
    print("row", json.dumps(found))
"""


def our_bytes(run: str) -> tuple[float, float, float]:
    """GiB of a GPU in a run of steps.csv: needed, reserved, and its published peak."""
    (row,) = (row for row in read_table("steps.csv") if row["run"] == run)
    told = predict(row)
    return told["needed"], told["reserved"], float(row["peak_GiB"])


def our_ms(gpu: str, model: str, phase: str, tokens: int, batch: int, tp: int) -> float:
    """Modelled milliseconds to the first or next token."""
    machine, estimate = get_machine(f"{gpu}_nvlink_ib"), prefill if phase == "prefill" else decode
    return 1000 * estimate(load_model(model), machine, tokens, Parallel(tp=tp, rows=batch)).seconds


def megatron_bytes(folder: Path, row: dict[str, str]) -> float:
    """GiB by `report_theoretical_memory` of megatron-core, whose other module is not needed."""
    utils = ModuleType("released.utils")
    vars(utils).update(is_hybrid_model=lambda args: False, print_rank_0=lambda text: None)
    sys.modules |= {"released": ModuleType("released"), "released.utils": utils}
    (path,) = folder.rglob("theoretical_memory_usage.py")
    spec = spec_from_file_location("released.memory", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    size = {name: int(value) for name, value in row.items() if value.isdecimal()}
    args = SimpleNamespace(
        **{"num_layers": size["layers"], "hidden_size": size["hidden"], "num_attention_heads": size["heads"]},
        **{"num_query_groups": size["kv_heads"], "ffn_hidden_size": size["mlp"], "padded_vocab_size": size["vocab"]},
        **{"kv_channels": size["hidden"] // size["heads"], "seq_length": size["seq"], "swiglu": True},
        **{"data_parallel_size": size["dp"], "world_size": size["dp"] * size["cp"], "normalization": "RMSNorm"},
        **{"micro_batch_size": size["rows_per_dp"] // int(row["micro_batches"]), "moe_router_topk": 1},
        **{"recompute_granularity": row["checkpointing"], "use_distributed_optimizer": True},
        **dict.fromkeys(("group_query_attention", "untie_embeddings_and_output_weights"), True),
        **dict.fromkeys(("sequence_parallel", "multi_latent_attention", "add_bias_linear"), False),
        **dict.fromkeys(("num_experts", "moe_shared_expert_intermediate_size", "mtp_num_layers", "moe_latent_size")),
        **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
        **dict.fromkeys(("expert_tensor_parallel_size", "expert_model_parallel_size"), 1),
        virtual_pipeline_model_parallel_size=None,
    )
    total: float = module.report_theoretical_memory(args)[2]
    return total / 1024


def deepspeed_bytes(folder: Path, row: dict[str, str]) -> float:
    """GiB by `estimate_zero3_model_states_mem_needs` of deepspeed, without offloading."""
    (path,) = folder.rglob("runtime/zero/stage3.py")
    name = "estimate_zero3_model_states_mem_needs"
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    (found,) = (node for node in functions if node.name == name)
    released: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), str(path), "exec"), released)
    estimate: Callable[..., tuple[int, int, int]] = released[name]
    shape: dict[str, Any] = {size: int(row[size]) for size in ("layers", "hidden", "heads", "kv_heads", "mlp", "vocab")}
    model = ModelConfig(name="x", **shape, head_dim=shape["hidden"] // shape["heads"], gated=True, tied=False)
    gpus, node = int(row["dp"]) * int(row["cp"]), int(row["gpus_per_node"])
    nodes = {"num_gpus_per_node": min(gpus, node), "num_nodes": max(gpus // node, 1)}
    largest = shape["vocab"] * shape["hidden"]  # of one module
    return estimate(model.parameters, largest, cpu_offload=False, cpu_offload_params=False, **nodes)[1] / 2**30


def _show(ms: float) -> str:
    return f"{float(f'{ms:.3g}'):,g}"


def main(folder: Path, python: str) -> None:
    """Print both tables."""
    for run in RUNS:
        (row,) = (row for row in read_table("steps.csv") if row["run"] == run)
        needed, reserved, peak = our_bytes(run)
        others = megatron_bytes(folder, row), deepspeed_bytes(folder, row)
        print(f"| {run} | {peak:.1f} | {needed:.1f}; {reserved:.1f} | {others[0]:.1f} | {others[1]:.1f} |")
    asked = subprocess.run([python, "-c", THEIRS, json.dumps(SERVING)], capture_output=True, text=True, check=True)
    told = [json.loads(line) for line in re.findall(r"^row (.*)", asked.stdout, re.MULTILINE)]
    for one, theirs in zip(SERVING, told, strict=True):
        gpu, model, phase, tokens, batch, tp = one
        words = f"{phase}, `{model}`, {tp} {gpu.upper()}, {batch} x {tokens:,} tokens"
        print(f"| {words} | {_show(our_ms(*one))} | {' | '.join(_show(x) if x else '-' for x in theirs)} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
