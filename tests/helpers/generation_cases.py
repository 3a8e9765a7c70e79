"""What the ranks of test_generation.py run: `generate()` of tiny random models, against one process."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_cases import BASE, make
from rank_pool import of_first, told_by
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, GenerationConfig

from ringattn.errors import InvalidInput
from ringattn.integrations.transformers import RingCache, parallelize, unparallelize

#: Ways of generating by name; "assistant" gets a smaller model.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 32},
    "sampled": {"max_new_tokens": 16, "do_sample": True, "temperature": 1.3},
    "beams": {"max_new_tokens": 12, "num_beams": 3},
    "lookup": {"max_new_tokens": 16, "prompt_lookup_num_tokens": 3},
    "assistant": {"max_new_tokens": 16},
    "chunked": {"max_new_tokens": 12, "prefill_chunk_size": 11},
}


def prompts(batch: int, tokens: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts; the first has padding before it."""
    ids = torch.randint(2, 61, (batch, tokens), generator=torch.Generator().manual_seed(5))
    if not padding:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    ids[0, :padding] = mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pair(name: str, ends: bool = False) -> tuple[Any, Any]:
    """A model alone and the same on these ranks. `ends`: token 2 ends a row, so that rows end at different steps."""
    alone = make(name, attn_implementation="eager", pad_token_id=0).eval()
    model = parallelize(make(name, pad_token_id=0).eval(), layout="zigzag")
    for each in (alone, model):
        each.generation_config.eos_token_id = 2 if ends else None
    return alone, model


def difference(alone: Any, model: Any, way: str, inputs: Any, rank: int, **more: Any) -> float:
    """`far` of a way to generate. Beams have scores."""
    options = {**WAYS[way], "output_scores": True}
    if way == "assistant":
        options["assistant_model"] = make("Llama", pad_token_id=0, num_hidden_layers=1).eval()
    torch.manual_seed(3)
    right = of_first(lambda: generate(alone, **inputs, **options))
    torch.manual_seed(3 + rank)  # rank 0's numbers are those of all
    return far(generate(model, **inputs, **options, **more), right)


def generate(model: Any, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The tokens and logits of a generation."""
    found = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    return found.sequences, found.logits


def far(mine: tuple[Any, Any], right: tuple[Any, Any]) -> float:
    """The largest difference of logits of two generations; infinity for other tokens."""
    if not torch.equal(mine[0], right[0]):
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(mine[1], right[1], strict=True))


def generations(rank: int, name: str, ways: list[str], batch: int, tokens: int, padding: int) -> dict[str, float]:
    """`difference` of each way to generate from random prompts."""
    alone, model = pair(name, ends=batch > 1)
    inputs = prompts(batch, tokens, padding)
    return {way: difference(alone, model, way, inputs, rank) for way in ways}


def conversations(rank: int, windows: str) -> tuple[float, float, int]:
    """Two turns with one cache, and rows of a layer with a window of 9 keys that all ranks hold together."""
    alone, model = pair("Gemma 3, hybrid")
    past, first, more = RingCache(model, page=4, windows=windows), prompts(2, 37), prompts(2, 13)["input_ids"]

    def converse() -> tuple[Any, torch.Tensor, torch.Tensor, int]:
        beside = DynamicCache(config=alone.config)
        told = generate(alone, **first, max_new_tokens=32, past_key_values=beside)
        turn = torch.cat([told[0], more], 1)
        right = alone.generate(turn, max_new_tokens=8, past_key_values=beside)
        return told, turn, right, beside.get_seq_length()

    told, turn, right, length = of_first(converse)
    one = far(generate(model, **first, max_new_tokens=32, past_key_values=past), told)
    mine = model.generate(turn, max_new_tokens=8, past_key_values=past)
    assert past.get_seq_length() == length, "tokens of the first turn were computed again"
    held = torch.tensor(sum(map(len, past.cache.rows(0))))
    if windows == "shard":
        dist.all_reduce(held)
    return one, float((mine != right).sum()), int(held)


def logits(rank: int, kept: list[int]) -> list[float]:
    """Differences of the logits of calls with a cache from one process: of prompts, and of a token after one.

    Of a prompt all logits are asked for, the last five, and some; the calls give positions or not, by place or name.
    """
    alone, model = pair("Llama")
    ids = prompts(2, 29)["input_ids"]
    right = alone(ids).logits
    calls: tuple[tuple[tuple[Any, ...], dict[str, Any], Any], ...] = (
        ((), {"input_ids": ids, "past_key_values": RingCache(model)}, slice(None)),
        ((ids,), {"cache": RingCache(model), "logits_to_keep": 5}, slice(-5, None)),
        ((ids, None, torch.arange(29)[None]), {"cache": RingCache(model), "logits_to_keep": torch.tensor(kept)}, kept),
    )
    with torch.no_grad():
        found = [(model(*args, **more), right[:, x]) for args, more, x in calls]
        past, beside = RingCache(model), DynamicCache(config=alone.config)
        for tokens in (ids[:, :20], ids[:, 20:21], ids[:, 21:23], ids[:, 23:]):  # a prompt, two steps, a chunk
            found.append(
                (model(tokens, past_key_values=past), alone(tokens, past_key_values=beside, use_cache=True).logits)
            )
    return [float((result.logits - right).abs().max()) for result, right in found]


def settings(rank: int) -> list[str]:
    """Which caches, set by the generation_config of a model or of a call, give other tokens than one process."""
    alone, model = pair("Llama")
    ids, wrong = prompts(1, 21), []
    right = alone.generate(**ids, max_new_tokens=6)
    for kind in ("static", "dynamic", "sliding_window", "hybrid", "offloaded"):
        model.generation_config.cache_implementation = kind
        given = GenerationConfig(max_new_tokens=6, cache_implementation=kind)
        for call in ({"max_new_tokens": 6}, {"generation_config": given}):
            if not torch.equal(model.generate(**ids, **call), right):
                wrong.append(f"{kind}, {[*call]}")
        model.generation_config.cache_implementation = None
    return wrong


def refusals(rank: int) -> dict[str, str]:
    """What calls that cannot be honoured are told, and whether after each of them the ranks generate as one process."""
    alone, model = pair("Llama")
    ids = prompts(1, 21)
    right, twice = alone.generate(**ids, max_new_tokens=3), diff_llama()

    def without_cache(**options: Any) -> Any:
        return model.generate(**ids, generation_config=GenerationConfig(max_new_tokens=3, **options))

    def in_both() -> Any:
        model.config.use_cache = False
        try:
            return without_cache(use_cache=False)
        finally:
            model.config.use_cache = True

    def unnamed() -> Any:
        """As if a release gave the cache by another name."""
        with pytest.MonkeyPatch.context() as patch:

            def prepare(self: Any, input_ids: Any, cache: Any = None, past_key_values: Any = None, **_: Any) -> Any:
                return {"input_ids": input_ids}

            patch.setattr(type(model), "prepare_inputs_for_generation", prepare)
            return model.generate(**ids, max_new_tokens=3)

    calls: dict[str, Any] = {
        "no cache": lambda: model.generate(**ids, use_cache=False),
        "no cache by config": lambda: without_cache(use_cache=False),
        "no cache by both configs": in_both,
        "cache of another name": unnamed,
        "quantized": lambda: without_cache(cache_implementation="quantized"),
        "guided": lambda: without_cache(guidance_scale=2.0),
        "guided by keyword": lambda: model.generate(**ids, guidance_scale=2.0),
        "early exit": lambda: without_cache(assistant_early_exit=1),
        "time": lambda: model.generate(**ids, max_time=9.0),
        "twice in a layer": lambda: twice.generate(**ids, max_new_tokens=3),
        "stops earlier": lambda: model.generate(**ids, max_new_tokens=3 + rank),
        "raises": lambda: model.generate(**ids, max_new_tokens=3, logits_processor=[raising] * rank),
        "a part": lambda: model.model(**ids),
        "the decoder": lambda: model.get_decoder()(input_ids=ids["input_ids"]),
        "another cache": lambda: model.generate(**ids, past_key_values=DynamicCache()),
        "static": lambda: model.generate(**ids, cache_implementation="static"),
        "hidden states": lambda: model.generate(**ids, output_hidden_states=True, return_dict_in_generate=True),
        "attentions": lambda: model.generate(**ids, output_attentions=True, return_dict_in_generate=True),
        "too long": lambda: model.generate(**ids, past_key_values=RingCache(model, max_tokens=20)),
        "too long later": lambda: model.generate(
            **ids, max_new_tokens=9, past_key_values=RingCache(model, max_tokens=25)
        ),
        "embeddings": lambda: model.generate(inputs_embeds=torch.zeros(1, 21, 32), max_new_tokens=3),
        "another owner": lambda: make("Llama", pad_token_id=0).generate(**ids, past_key_values=RingCache(model)),
        "behind": lambda: pair("Mistral, window")[1].generate(
            **ids, attention_mask=(torch.arange(21) % 15 < 9).long()[None], max_new_tokens=3
        ),
        "padded right": lambda: model.generate(**ids, attention_mask=(torch.arange(21) < 15).long()[None]),
        "another prompt": lambda: model.generate(ids["input_ids"] + (rank == 1), max_new_tokens=3),
        "a shorter prompt": lambda: model.generate(ids["input_ids"][:, rank:], max_new_tokens=3),
        "no prompt": lambda: model.generate(ids["input_ids"][:, :0], max_new_tokens=3),
        "another model": lambda: RingCache(unparallelize(make("Llama"))),
        "other tokens": lambda: model.generate(**ids, max_new_tokens=9, logits_processor=[Parting(rank)]),
    }
    found = {}
    for name, call in calls.items():
        found[name] = told_by(call)
        again = model.generate(**ids, max_new_tokens=3)
        assert torch.equal(again, right), name
    return found


def diff_llama() -> Any:
    """A parallelized model whose layers attend twice."""
    torch.manual_seed(1)
    return parallelize(DiffLlamaForCausalLM(DiffLlamaConfig(**BASE, pad_token_id=0)).eval(), layout="zigzag")


def raising(*args: Any) -> Any:
    """A logits processor that fails on one rank."""
    raise InvalidInput("of a logits processor")


def example(rank: int, words: list[str], lines: str) -> str:
    """What examples/generate.py prints on this rank, whose group it takes for its own; rank 0 has the lines."""
    file = str(Path(__file__).resolve().parents[2] / "examples/generate.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("RANK", str(rank))
        patch.setattr(sys, "argv", [file, *words])
        patch.setattr(sys, "stdin", io.StringIO(lines if rank == 0 else ""))
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(dist, name, lambda *_: None)
        runpy.run_path(file, run_name="__main__")
    return printed.getvalue()


class Parting:
    """A logits processor by which rank 1 takes another token from the fourth on."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3 and self.rank == 1:
            scores[:, scores.argmax(-1)] = -torch.inf
        return scores
