"""Every text model of the installed transformers, tiny, over ranks and alone: none may be accepted that is not exact.

python tests/helpers/sweep.py [--table FILE] [CLASS ...]    # without classes all of them
"""

from __future__ import annotations

import argparse
import multiprocessing
import inspect
import logging
import sys
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from transformers.models.auto import configuration_auto, modeling_auto

import ringattn as ra
from ringattn.integrations.transformers import parallelize, shard_batch

TOKENS, LEFT, BORDERS = 41, 11, [0, 17, 41]
CLASSES = 99
MODES = ("packed", "padded", "checkpointed")
GROUPS: list[Any] = []
LIMIT = 90.0
KINDS = ("", "_FOR_CAUSAL_LM", "_FOR_MASKED_LM", "_FOR_TOKEN_CLASSIFICATION", "_FOR_SEQUENCE_CLASSIFICATION", "_FOR_QUESTION_ANSWERING")  # fmt: skip
#: Sizes of a tiny model by the names that configurations have for them; a configuration takes those that it knows.
SIZES: tuple[tuple[Any, str], ...] = (
    (CLASSES, "vocab_size entity_vocab_size pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd dim embedding_size emb_dim moe_intermediate_size word_embed_proj_dim d_embed"),
    (32, "shared_expert_intermediate_size dense_intermediate_size"),
    (64, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner hidden_dim"),
    (2, "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_key_value_heads"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk top_k_experts top_k moe_top_k moe_k num_hidden_groups"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (8, "head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim kv_channels global_head_dim"),
    (8, "hidden_size_per_layer_input rotary_dim"),
    (16, "kv_lora_rank q_lora_rank index_head_dim laurel_rank entity_emb_size pronunciation_embed_dim shape_embed_dim"),
    (1, "n_group topk_group max_window_layers first_k_dense_replace n_shared_experts"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (9, "sliding_window"),
    (18, "local_attention"),
    (True, "use_sliding_window"),
    (0, "pad_token_id num_kv_shared_layers"),
    (3, "bos_token_id"),
    (5, "eos_token_id"),
    (0.0, "attention_dropout hidden_dropout dropout attn_pdrop resid_pdrop embd_pdrop attention_probs_dropout_prob"),
    (0.0, "hidden_dropout_prob layerdrop activation_dropout classifier_dropout embedding_dropout mlp_dropout"),
    (
        0.0,
        "router_jitter_noise input_jitter_noise jitter_noise classifier_dropout_prob attn_dropout residual_dropout resid_dropout embed_dropout",
    ),
)
#: What is tried for a model that those sizes do not fit.
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"hidden_size": 512, "head_dim": 128},
    {"attn_pdrop": 0, "resid_pdrop": 0},
    {"attention_types": [[["global", "local"], 1]], "window_size": 9},
)
BY_NAME = {name: size for size, names in SIZES for name in names.split()}


def classes() -> dict[str, str]:
    """The model type of every class of the automatic mappings."""
    found: dict[str, str] = {}
    for kind in KINDS:
        for model_type, names in getattr(modeling_auto, f"MODEL{kind}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return found


def configure(kind: type, **more: Any) -> Any:
    """A tiny configuration of this class, and of the configurations in it."""
    known = (
        set(inspect.signature(kind.__init__).parameters)
        | set(getattr(kind, "__annotations__", ()))
        | set(getattr(kind, "__dataclass_fields__", ()))
    )
    words = {name: size for name, size in BY_NAME.items() if name in known}
    for name, sub in (getattr(kind, "sub_configs", None) or {}).items():
        if sub is not hf.AutoConfig:
            words[name] = configure(sub).to_dict()
    return kind(**{**words, **more})


def make(name: str, model_type: str, **more: Any) -> Any:
    """The model with random weights, the same on every rank, none of them 0."""
    kind = getattr(hf, name)
    known = kind.config_class or configuration_auto.CONFIG_MAPPING[model_type]
    config = configure(known, **more)
    if "CausalLM" in name or "LMHead" in name:
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > 6_000_000:
        raise ValueError(f"{size:,} parameters")
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = kind(config).float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * min(0.15, p.shape[-1] ** -0.5)) if p.ndim > 1 else p.add_(noise * 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()


def fit(name: str, model_type: str, ids: torch.Tensor) -> dict[str, Any]:
    """The first of `OTHERS` with which the model can be made and run. Raises the error of the first."""
    first = None
    for more in OTHERS:
        try:
            model = make(name, model_type, **more)
            model(ids, **flags(model))
            return more
        except Exception as error:
            first = first or error
    raise first


def outputs(result: Any) -> dict[str, torch.Tensor]:
    names = ("logits", "last_hidden_state", "pooler_output", "start_logits", "end_logits")
    return {n: result[n] for n in names if n in result and isinstance(result[n], torch.Tensor)}


def weight(x: torch.Tensor, start: int = 0, row: int = 0) -> torch.Tensor:
    """A cotangent that depends on the place in the batch."""
    shape = (2, TOKENS, *x.shape[2:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))[row : row + 1, start : start + x.shape[1]]


def alone(
    model: Any, parts: list[tuple[int, int, int]], ids: torch.Tensor
) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """(outputs of each part alone, gradients of all)"""
    model.zero_grad()
    found = []
    for row, start, stop in parts:
        result = outputs(model(ids[row : row + 1, start:stop], **flags(model)))
        loss = sum(
            (x * weight(x, start, row)).sum() if x.ndim > 1 and x.shape[1] == stop - start else x.sum() * 0
            for x in result.values()
        )
        loss.backward()
        found.append({n: x.detach() for n, x in result.items()})
    return found, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def flags(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def one(rank: int, name: str, model_type: str, more: dict[str, Any]) -> dict[str, str]:
    """What each mode of a class gave on this rank: exact, WRONG with the difference, or the words of its refusal."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.use_deterministic_algorithms(False)
    try:
        if "input_ids" not in inspect.signature(getattr(hf, name).forward).parameters:
            return {"": "not text"}
        ids = torch.randint(6, CLASSES, (2, TOKENS), generator=torch.Generator().manual_seed(2))
        more = {**fit(name, model_type, ids[:1]), **more}
        model = make(name, model_type, **more)
        modes = {"packed": [(0, 0, 17), (0, 17, TOKENS)], "padded": [(0, 0, TOKENS), (1, LEFT, TOKENS)]}
        expected = {mode: alone(model, parts, ids) for mode, parts in modes.items()}
    except Exception as error:
        return {"": f"not buildable: {type(error).__name__}: {str(error)[:150]}"}
    if not GROUPS:
        patience = timedelta(seconds=LIMIT / 3)
        GROUPS.extend((dist.new_group([0, 1], timeout=patience), dist.new_group([0, 1, 2], timeout=patience)))
    found: dict[str, str] = {}
    for group, layout in zip(GROUPS, ("zigzag", "contiguous"), strict=True):
        if layout == "zigzag" and rank == 2:
            continue
        mode = MODES[0]
        try:
            model = parallelize(make(name, model_type, **more), group, layout=layout)
            for mode in MODES:
                key = f"{mode} {dist.get_world_size(group)}"
                right = expected["packed" if mode == "checkpointed" else mode]
                found[key] = compare(model, group, layout, mode, right, ids)
        except ra.RingAttentionError as error:
            found[f"from {mode} on" if found or mode != MODES[0] else ""] = f"refused: {type(error).__name__}: {error}"
        except Exception as error:
            return {f"from {mode} on": f"crash: {type(error).__name__}: {str(error)[:150]}"}
    return found


def compare(model: Any, group: Any, layout: str, mode: str, expected: Any, ids: torch.Tensor) -> str:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    cut = ra.make_layout(layout, tokens=TOKENS, ranks=ranks)
    batch = {"input_ids": ids if mode == "padded" else ids[:1]}
    parts = [(0, 0, 17), (0, 17, TOKENS)] if mode in ("packed", "checkpointed") else [(0, 0, TOKENS), (1, LEFT, TOKENS)]
    borders = BORDERS if mode in ("packed", "checkpointed") else None
    if mode == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, :LEFT] = 0
    model.train(mode == "checkpointed")
    if mode == "checkpointed":
        if not model.supports_gradient_checkpointing:
            return "exact"
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    local = outputs(model(**shard_batch(batch, group, layout=layout, cu_seqlens=borders), **flags(model)))
    loss, wrong = torch.zeros(()), {}
    places = torch.as_tensor(cut.positions(rank))
    whole: dict[str, torch.Tensor] = {}
    for n, x in local.items():
        if x.ndim > 1 and x.shape[1] == len(places):
            full = torch.cat([weight(x.new_zeros(1, TOKENS, *x.shape[2:]), 0, r) for r in range(len(x))])
            if mode == "padded":
                full[1, :LEFT] = 0
            loss = loss + (x * full[:, places]).sum()
            shards: list[Any] = [None] * ranks
            dist.all_gather_object(shards, x.detach().numpy(), group=group)
            whole[n] = cut.unshard_tensor([torch.from_numpy(s) for s in shards], dim=1)
        else:
            loss = loss + x.sum() * 0
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for g in gradients:
        dist.all_reduce(g, group=group)
    for (row, start, stop), right in zip(parts, expected[0], strict=False):
        for n, x in right.items():
            ours = whole[n][row, start:stop] if n in whole else local[n][row]
            wrong[n] = (
                max(wrong.get(n, 0), float((ours - x[0]).abs().max() / x.abs().max().clamp(min=1e-6)))
                if ours.shape == x[0].shape
                else 99.0
            )
    largest = max(float(g.abs().max()) for g in expected[1]) or 1.0
    wrong["gradients"] = max(float((a - b).abs().max()) / largest for a, b in zip(gradients, expected[1], strict=True))
    bad = {n: round(x, 6) for n, x in wrong.items() if not x < 2e-4}
    return f"WRONG {bad}" if bad else "exact"


def verdict(results: list[dict[str, str]]) -> str:
    """One line of what the ranks found: the modes of each answer."""
    modes: dict[str, set[str]] = {}
    for found in results:
        for mode, text in found.items():
            modes.setdefault(text, set()).add(mode)
    if list(modes) == ["exact"]:
        return "exact"
    return " | ".join(
        f"{text} [{', '.join(sorted(m))}]" if m != {""} else text for text, m in modes.items() if text != "exact"
    )


class Ranks:
    """Three Gloo ranks, forks of this process, which has imported what they need."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, ends = zip(*(context.Pipe() for _ in range(3)), strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, self.folder.name, end), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process in self.processes:
            process.start()

    def run(self, *args: Any) -> list[dict[str, str]]:
        for pipe in self.pipes:
            pipe.send(args)
        return [pipe.recv() if pipe.poll(LIMIT) else {"": f"crash: no answer in {LIMIT} s"} for pipe in self.pipes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(rank: int, folder: str, pipe: Any) -> None:
    """Answer for one class after another."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=LIMIT / 3))
    while True:
        pipe.send(one(rank, *pipe.recv()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    known, counts = classes(), Counter()
    names = options.names or sorted(known)
    out = options.table.open("w") if options.table else sys.stdout
    for name in names:
        getattr(hf, name, None)
    ranks = Ranks()
    for name in names:
        text = verdict(ranks.run(name, known[name], {}))
        if "crash" in text or "CommFailure" in text or "Mismatch" in text:
            ranks.end()
            ranks = Ranks()
        word = next(w for w in ("WRONG", "crash", "refused", "not buildable", "not text", "exact") if w in text)
        counts[word] += 1
        print(f"{word}\t{name}\t{text}", file=out, flush=True)
    ranks.end()
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
