"""Serving: the fewest GPUs against loops over every spread, misses in bytes, and words that give no time for them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from launches import SERVERS, read_server

import ringattn as ra
from ringattn import InvalidInput
from ringattn.lab.advise.engines import ENGINES, command, starts
from ringattn.lab.advise.search import Offer, Question
from ringattn.lab.advise.serving import CHUNKS, Serving, serve
from ringattn.lab.models.config import ModelConfig, load_model
from ringattn.lab.models.inference import decode, prefill
from ringattn.lab.models.parallel import Parallel, Software
from ringattn.text import digits, duration, size

MODEL = ModelConfig("tiny", 2, 256, 8, 4, 32, 512, 1024)
MACHINE = replace(ra.get_machine("h100_nvlink_ib"), ranks_per_node=4)


def answer(**more: Any) -> Serving:
    offer = more.pop("offer", Offer("small", more.pop("machine", MACHINE), None))
    question = {"model": MODEL, "offers": (offer,), "phase": "decode", "tokens": 8192, "gpus": 4, **more}
    return serve(Question(**question), offer)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("users", [1, 4])
def test_the_best_of_each_number_is_what_loops_find(phase: str, users: int) -> None:
    """Of all cp x dp x tp: tp divides 4 key/value heads, and dp the users."""
    serving = answer(phase=phase, batch=users)
    model = {"prefill": prefill, "decode": decode}[phase]
    for gpus in (1, 2, 4):
        tried = [
            model(MODEL, MACHINE, 8192, Parallel(cp, dp, tp, rows=users // dp)).seconds
            for cp, dp, tp in product((1, 2, 4), repeat=3)
            if cp * dp * tp == gpus and users % dp == 0
        ]
        assert min(tried) <= serving.best[gpus].seconds <= min(tried) * 1.011
    times = {gpus: one.seconds for gpus, one in serving.best.items()}
    assert serving.chosen == min(times, key=lambda gpus: (times[gpus], gpus))
    for seconds in times.values():
        first = min(n for n in times if times[n] <= seconds)
        limited = answer(phase=phase, batch=users, within=seconds)
        assert limited.chosen == first and f"{first} GPU" in limited.verdict and "are the fewest" in limited.verdict
    impossible = answer(phase=phase, batch=users, within=1e-9)
    gpus, words = serving.chosen, impossible.verdict
    assert gpus is not None and impossible.chosen is None and "no number of GPUs up to 4 gives" in words
    assert f"{gpus} GPU" in words and serving.best[gpus].parallel.name in words and duration(times[gpus]) in words
    waits = {"prefill": "first token", "decode": "next token of every sequence"}[phase]
    assert f"gives the {waits} within 0.001 us" in words and f"{times[gpus] / 1e-9:.3g} times the limit" in words


def test_what_does_not_fit_has_bytes_and_no_time() -> None:
    machine = MACHINE.changed(memory=1.5e9)
    serving = answer(machine=machine, batch=64, tokens=1 << 15)
    need = 64 * (1 << 15) * 2 * 2 * 4 * 32 * 2  # sequences, tokens, layers, K and V, heads, columns, bytes
    assert need > 1.5e9 and 1 in serving.misses and 1 not in serving.best and 4 in serving.best
    (row,) = (row for row in serving.rows if row[0] == "1")
    assert row[2:5] == ("does not fit", "", "") and "most of it keys and values" in serving.describe_miss(1)
    assert serving.chosen in serving.best and set(serving.record["does not fit"]) == {str(n) for n in serving.misses}
    nothing = answer(machine=MACHINE.changed(memory=1e6))
    assert not nothing.best and nothing.chosen is None and "fits on no number of GPUs up to 4" in nothing.verdict


def test_eight_bits_halve_weights() -> None:
    """Of the 8 billion parameters of Llama 3, all but two tables of 128,256 rows of 4,096 take one byte."""
    model, machine = load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib")
    wide, narrow = (
        decode(model, machine, 8192, Parallel(software=Software(fp8=fp8))).memory["weights"] for fp8 in (False, True)
    )
    layers = model.layers * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336)
    assert wide - narrow == layers
    offer = Offer("h100", machine, None)
    times = [answer(model=model, offer=offer, software=Software(fp8=fp8), gpus=1) for fp8 in (False, True)]
    slow, fast = (one.best[1].seconds for one in times)
    assert slow > 1.5 * fast


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"within": 0.0}, "within=0.0: must be a number of seconds > 0"),
        ({"gpus": 3, "batch": 3, "tokens": 2, "machine": MACHINE.changed(flops_dtype=None)}, None),
        ({"software": Software("float32")}, "no cp x dp x tp of 4 GPUs serves tiny: dtype=float32"),
    ],
)
def test_questions_without_an_answer_say_why(change: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert answer(**change).best[3].parallel.dp == 3
        return
    with pytest.raises(InvalidInput, match=words):
        answer(**change)


def test_nothing_that_fits_ends_with_status_2(inside: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    told = inside("advise phase=decode tokens=8k gpus=2 within=1e-9", status=2).stdout
    assert "no number of GPUs up to 2" in told and "times the limit" in told


def test_fewer_heads_of_keys_than_ranks_are_copied() -> None:
    """Qwen3-Next, 2 key/value heads, on its card's 4 GPUs for 262,144 tokens: each rank holds a whole head."""
    model, machine = load_model("qwen3_next_80b"), ra.get_machine("h100_nvlink_ib")
    serving = answer(model=model, offer=Offer("h100", machine, 2.5), tokens=1 << 18)
    assert serving.chosen == 4 and serving.best[4].parallel.tp == 4
    two, four = (decode(model, machine, 1 << 18, Parallel(tp=tp)) for tp in (2, 4))
    assert two.memory["keys and values"] == four.memory["keys and values"]
    copied = 12 * 2 * 256 * 2048 * 2  # 12 layers, a key and a value of 256 columns, of which half would be a share
    assert 2 * four.memory["weights"] - two.memory["weights"] == pytest.approx(copied, abs=8)
    # 194 tokens a second for 10 USD an hour; a million draw 2.8 kW that long.
    seconds = 1e6 * serving.best[4].seconds
    assert f"{digits(seconds / 3600 * 4 * 2.5)} USD" in serving.verdict
    assert f"{digits(seconds * 4 * 700 / 3.6e6)} kWh" in serving.verdict


@pytest.mark.parametrize("engine", ENGINES, ids=lambda one: one.name.split()[0])
@pytest.mark.parametrize(
    ("model", "software", "parallel"),
    [
        ("llama3_8b", Software(), Parallel(dp=4, tp=4, rows=3)),
        ("llama3_8b", Software(fp8=True, fp8_cache=True), Parallel(dp=2, tp=1)),
        ("llama3_8b", Software(fp8=True, fp8_blocks=True), Parallel(tp=8)),
        ("deepseek_v3", Software("float16", fp8=True), Parallel(tp=2, dp=4, ep=4, rows=3)),
        ("gpt_oss_120b", Software(fp8=True), Parallel(tp=2)),
    ],
)
def test_commands_have_names_that_servers_know(engine: Any, model: str, software: Software, parallel: Parallel) -> None:
    known = SERVERS[engine.name.split()[0]]
    assert engine.name == f"{known['name']} {known['release']}" and engine.start == known["start"]
    assert {*re.findall(r"--([a-z-]+)", engine.splits)} <= {*known["options"]}
    line = command(engine, load_model(model), 8192, replace(parallel, software=software))
    no_blocks = software.fp8_blocks and engine.name.startswith("SGLang")
    assert (line == "") == (no_blocks or model == "gpt_oss_120b")
    if not line:
        return
    given = read_server(line)
    shared = parallel.ep > 1  # SGLang's groups are within its tp, and its limit is that of all
    sglang = shared and engine.name.startswith("SGLang")
    assert given["tensor-parallel-size"] == (8 if sglang else parallel.tp) and given[engine.length] == 8193
    assert given.get("data-parallel-size", 1) == (4 if shared and not sglang else 1)
    assert given.get("attention-data-parallel-size", 1) == (4 if sglang else 1)
    assert given[engine.users] == parallel.rows * (4 if sglang else 1)
    assert ("enable-expert-parallel" in given or given.get("expert-parallel-size") == 8) == shared
    assert ("quantization" in given) == (software.fp8 and model != "deepseek_v3")
    assert given["kv-cache-dtype"].startswith("fp8") == software.fp8_cache and given["dtype"] == software.dtype


def test_a_server_is_on_one_host_and_has_no_context_parallelism() -> None:
    node, rack = ra.get_machine("h100_nvlink_ib"), ra.get_machine("gb200_nvl72")  # of hosts with 8 and 4 GPUs
    assert starts(node, Parallel(tp=8)) and not starts(rack, Parallel(tp=8)) and starts(rack, Parallel(dp=9, tp=4))
    assert starts(node, Parallel(dp=2, tp=4, ep=2)) and not starts(node, Parallel(dp=4, tp=4, ep=4))
    assert not starts(node, Parallel(dp=4, ep=2)) and not starts(node, Parallel(cp=2))


def test_servers_start_what_is_fastest_without_context_parallelism() -> None:
    """A prompt alone on 16 GPUs has tp=8 in a node and cp=2; a server has no cp, and starts tp=8 of 8 GPUs."""
    offer = Offer("h100", ra.get_machine("h100_nvlink_ib"), 2.5)
    serving = answer(model=load_model("llama3_8b"), offer=offer, phase="prefill", tokens=1 << 17, gpus=16)
    assert serving.chosen == 16 and serving.best[16].parallel.cp > 1 and 16 not in serving.plain
    fastest = serving.plain[8]
    assert fastest.parallel == Parallel(tp=8, schedule="auto") and fastest.seconds > serving.best[16].seconds
    for (words, line), engine in zip(serving.launches, ENGINES, strict=True):
        assert words.startswith(f"{engine.name}: tp=8: {duration(fastest.seconds)} [modelled]. It splits prompts ")
        assert line in serving.record["launch"] and " --tensor-parallel-size 8 " in line
    assert answer(within=1e-9).launches == []
    limit = {"phase": "prefill", "tokens": 1 << 17, "gpus": 16, "within": serving.best[16].seconds}
    late = answer(model=load_model("llama3_8b"), offer=offer, **limit)
    assert f"{fastest.seconds / serving.best[16].seconds:.3g} times the limit" in late.launches[0][0]
    two = answer(batch=16, gpus=16, machine=ra.get_machine("h100_nvlink_ib"))
    assert two.best[16].parallel.dp == 16 and "by this command for each of 16 groups" in two.launches[0][0]


def test_experts_of_a_decode_are_shared_by_ranks_with_their_own_sequences() -> None:
    """DeepSeek-V3 on 8 MI300X: each rank has the latents of 8 of 64 users, and an eighth of the experts."""
    offer = Offer("mi300x", ra.get_machine("mi300x_ib"), 3.0)
    serving = answer(model=load_model("deepseek_v3"), offer=offer, batch=64, gpus=8, software=Software(fp8_cache=True))
    best = serving.best[8].parallel
    assert (best.dp, best.ep) == (8, 8) and all("--data-parallel-size 8" in x for x in serving.launches[0][1:])
    assert serving.best[8].parts["ep"] > 0 and serving.record["best"]["8"]["ep"] == 8


def test_prompts_that_do_not_fit_come_in_chunks() -> None:
    """On one GPU the activations of a whole prompt are too many, those of a chunk are not; keys and values stay."""
    prompt: dict[str, Any] = {"phase": "prefill", "tokens": 1 << 18, "gpus": 1}
    whole, machine = answer(**prompt).best[1], MACHINE.changed(memory=1e9)
    serving = answer(machine=machine, **prompt)
    chunked = prefill(MODEL, machine, 1 << 18, serving.best[1].parallel, chunk=(1 << 18) // CHUNKS)
    assert whole.bytes - whole.memory["reserved"] > 1e9 and serving.best[1] == chunked
    assert chunked.memory["keys and values"] == whole.memory["keys and values"]
    assert "one GPU in 32 chunks" in serving.verdict and "chunks" not in answer(**prompt).verdict


def test_keys_and_values_in_eight_bits_are_half_as_many_bytes() -> None:
    """Weights stay; a decode reads half of the bytes of keys and values, and a prefill keeps half of them."""
    model, machine = load_model("llama3_8b"), ra.get_machine("h100_nvlink_ib")
    for phase in (decode, prefill):
        wide, narrow = (
            phase(model, machine, 1 << 15, Parallel(tp=2, software=Software(fp8_cache=fp8))) for fp8 in (False, True)
        )
        assert wide.memory["keys and values"] == 2 * narrow.memory["keys and values"] == (1 << 15) * 32 * 2 * 4 * 256
        assert wide.memory["weights"] == narrow.memory["weights"]
        if phase is decode:
            assert narrow.parts["keys and values"] == pytest.approx(wide.parts["keys and values"] / 2)
            assert narrow.parts["mlp"] == wide.parts["mlp"]


def test_changes_are_those_of_the_chosen_spread() -> None:
    """Each is an estimate of its own, and one that does not fit says by how much."""
    serving = answer(batch=4, tokens=1 << 20, gpus=2)
    chosen = serving.best[serving.chosen or 0].parallel
    more, longer, *bits = serving.changes
    assert chosen.rows * chosen.dp == 4
    wide = decode(MODEL, MACHINE, 1 << 20, replace(chosen, rows=4 * chosen.rows))
    assert more == f"With 16 sequences it takes {duration(wide.seconds)} and {size(wide.bytes)}."
    far = decode(MODEL, MACHINE, 1 << 22, chosen)
    assert longer == f"With 4,194,304 tokens it takes {duration(far.seconds)} and {size(far.bytes)}."
    assert [line.split()[1] for line in bits] == ["fp8_cache=true", "fp8=true"]
    tight = answer(batch=4, tokens=1 << 20, gpus=1, machine=MACHINE.changed(memory=1.1 * serving.best[1].bytes))
    assert ", but a GPU needs " in tight.changes[0] and "more than the" in tight.changes[0]
    known = answer(software=Software(fp8=True, fp8_cache=True), gpus=1)
    assert len(known.changes) == 2 and answer(within=1e-9).changes == []
