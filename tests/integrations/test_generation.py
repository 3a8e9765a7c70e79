"""generate() of Hugging Face models on real ranks against one process: the same tokens and logits."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
import generation_cases as cases

MOST = 1e-5


# Each family also meets the other number of ranks, below.
@pytest.mark.multi
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("Llama", 3), ("Mistral, window", 3), ("Qwen3", 2), ("Gemma 3, hybrid", 2), ("GPT-OSS, sinks", 3)],
)
def test_32_greedy_tokens_are_those_of_one_process(run_ranks, name: str, ranks: int) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(cases.generations, ranks, name, ["greedy"], 1, 37, 0, timeout=120):
        assert found["greedy"] <= MOST


@pytest.mark.multi
@pytest.mark.parametrize(("name", "ranks"), [("Llama", 2), ("Gemma 3, hybrid", 3), ("GPT-OSS, sinks", 2)])
def test_every_way_to_generate(run_ranks, name: str, ranks: int) -> None:  # type: ignore[no-untyped-def]
    ways = ["sampled", "beams", "lookup", "assistant", "chunked"]
    for tokens in (3, 29):
        for found in run_ranks(cases.generations, ranks, name, ways, 1, tokens, 0, timeout=120):
            assert set(found) == set(ways) and max(found.values()) <= MOST, (tokens, found)


@pytest.mark.multi
@pytest.mark.parametrize(("name", "ranks"), [("Mistral, window", 2), ("Qwen3", 3)])
def test_padded_batches(run_ranks, name: str, ranks: int) -> None:  # type: ignore[no-untyped-def]
    ways = ["greedy", "sampled", "beams", "chunked"]
    for found in run_ranks(cases.generations, ranks, name, ways, 2, 29, 6, timeout=120):
        assert max(found.values()) <= MOST, found


@pytest.mark.multi
@pytest.mark.parametrize(("name", "tokens"), [("longrope", 21), ("longrope", 40), ("dynamic", 21)])
def test_rope_by_length(run_ranks, name: str, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """Phi-3 computes all tokens again where a generation crosses the length of 32 that it was trained with."""
    for found in run_ranks(cases.generations, 2, name, ["sampled"], 1, tokens, 0, timeout=120):
        assert found["sampled"] <= MOST


@pytest.mark.multi
@pytest.mark.parametrize(("name", "tokens"), [("longrope", 36), ("dynamic", 40)])
def test_rope_by_length_where_every_row_is_padded(run_ranks, name: str, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """The length of 32 that the model was trained with is reached by places, not by positions, or by both."""
    for found in run_ranks(cases.generations, 2, name, ["sampled"], 1, tokens, 6, timeout=120):
        assert found["sampled"] <= MOST


@pytest.mark.multi
@pytest.mark.parametrize("windows", ["shard", "copy"])
def test_a_conversation_goes_on_with_its_cache(run_ranks, windows: str) -> None:  # type: ignore[no-untyped-def]
    for one, tokens, rows in run_ranks(cases.conversations, 2, windows, timeout=120):
        assert one <= MOST and tokens == 0
        # The window of 9 keys holds 8 before the next token, and at most a page of 4 more on each rank.
        assert 8 <= rows <= 8 + 2 * 4


@pytest.mark.multi
def test_all_ranks_have_the_logits_that_are_asked_for(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for found in run_ranks(cases.logits, 3, [3, 28, 7], timeout=120):
        assert len(found) == 7 and max(found) <= MOST, found


@pytest.mark.multi
def test_a_cache_that_a_checkpoint_names_is_replaced(run_ranks) -> None:  # type: ignore[no-untyped-def]
    assert run_ranks(cases.settings, 2, timeout=120) == [[], []]


@pytest.mark.multi
def test_what_cannot_be_honoured_is_an_error_on_all_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    words = {
        "no cache": "use_cache=False; a parallelized model generates only with its cache",
        "no cache by config": "use_cache=False",
        "no cache by both configs": "use_cache=False",
        "cache of another name": "under a name that ringattn knows (cache or past_key_values or cache_params)",
        "quantized": "quantized is not a RingCache",
        "guided": "guidance_scale=2.0: it generates a second sequence",
        "guided by keyword": "guidance_scale=2.0",
        "early exit": "assistant_early_exit=1",
        "time": "max_time=9.0: ranks would stop after different numbers of tokens",
        "twice in a layer": "DiffLlamaAttention attends twice in layer 0",
        "stops earlier": "end of generate()",
        "raises": "of a logits processor",
        "a part": "InvalidInput: LlamaModel is a part of a parallelized model",
        "the decoder": "InvalidInput: LlamaModel is a part",
        "another cache": "DynamicCache is not a RingCache; leave it out",
        "static": "static is not a RingCache",
        "hidden states": "output_hidden_states=True: each rank has only its own rows",
        "attentions": "output_attentions=True",
        "too long": "21 new tokens after 0: the cache has max_tokens=20",
        "too long later": "1 new token after 25: the cache has max_tokens=25",
        "embeddings": "inputs_embeds is not supported; give input_ids alone",
        "another owner": "a RingCache works only with the model it was made for",
        "behind": "padding on the right would be counted in windows",
        "padded right": "a row ends in padding; set padding_side='left'",
        "another prompt": "Mismatch: the ranks disagree about tokens (give every rank the whole prompt, not a shard): ",
        "no prompt": "InvalidInput: generate: input_ids (1, 0) has no token",
        "a shorter prompt": "Mismatch: the ranks disagree about",
        "another model": "this model is not parallelized",
        "other tokens": "Mismatch: the ranks disagree about the tokens of this step",
    }
    for found in run_ranks(cases.refusals, 2, timeout=120):
        for name, word in words.items():
            assert word in found[name], (name, found[name])


@pytest.mark.multi
def test_the_example_answers_lines(run_ranks) -> None:  # type: ignore[no-untyped-def]
    printed, nothing = run_ranks(cases.example, 2, ["--tokens", "9"], "one two three\nfour\n")
    *lines, last = printed.splitlines()
    assert len(lines) == 2 and all(lines) and not nothing
    assert last.startswith("rank 0 of 2 holds ") and last.endswith(" bytes of 36 tokens")
