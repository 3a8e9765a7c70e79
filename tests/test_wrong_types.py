"""Public functions refuse arguments of wrong types in one line: with a RingAttentionError, whatever the value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn.text import shown

DEEP_LIST: list[Any] = []
DEEP_DICT: dict[str, Any] = {}
for _ in range(3000):
    DEEP_LIST, DEEP_DICT = [DEEP_LIST], {"a": DEEP_DICT}
WRONG = [
    *(3, None, "x", [], {}, object(), 1.5, -1, True, float("nan"), b"x", "\0", int),
    *("(", "(" * 5000, "~" * 5000 + "Causal()", DEEP_LIST, DEEP_DICT),
]
Q = torch.zeros(1, 2, 8, 4)
CALL = {"q": Q, "k": Q, "v": Q, "pattern": ra.Causal()}
PLAN = ra.make_plan(ra.Causal(), tokens=8, ranks=2)
TWO_RANKS: dict[str, Any] = {"layout": "zigzag", "ranks": 2}
SEGMENTS = {"segment_lengths": [4], "dilation_rates": [1]}
ROWS = torch.zeros(1, 8, 2)
STATES = {"layout": "zigzag", "ranks": 2}
#: Arguments that each function accepts.
RIGHT: dict[str, dict[str, Any]] = {
    "BlockSparse": {"block": 4, "table": [[True]]},
    "Dilated": {"segments": (4,), "rates": (1,)},
    "Documents": {"lengths": [4, 4]},
    "Dropout": {"p": 0.1},
    "KVCache": {"patterns": [ra.Causal()], "layers": 1, "ranks": 1},
    "Machine": {"flops": 1e12, "latency": 1e-6, "bandwidth": 1e9},
    "Rows": {"expand": lambda x: (x, x)},
    "Sinks": {"n": 1},
    "Strided": {"step": 2},
    "Window": {"left": 2},
    "affine_scan": {"a": ROWS, "b": ROWS, **STATES},
    "attention": CALL,
    "auto_batch_size": {"call": lambda batch: batch, "start": 2},
    "causal_conv1d": {"x": ROWS.mT, "weight": ROWS[0, :2], **STATES},
    "create_block_sparse_attention": {"block": 4, **SEGMENTS},
    "create_dilated_attention": SEGMENTS,
    "create_multihead_block_sparse": {"embed_dim": 8, "num_heads": 2},
    "create_multihead_dilated_attention": {"embed_dim": 8, "num_heads": 2, **SEGMENTS},
    "dilated_blocks": {"block": 4, "offsets": (0, 1)},
    "from_block_mask": {"mask": None},
    "gated_delta_rule": {**dict.fromkeys("qkv", Q.transpose(1, 2)), "g": ROWS, "beta": ROWS, **STATES},
    "get_block_sparse_preset": {"name": "local"},
    "get_machine": {"machine": "cpu"},
    "global_local": {"block": 4},
    "hierarchical": {"block": 4},
    "local_window": {"block": 4, "blocks": 2},
    "make_layout": {"name": "zigzag", "tokens": 8, "ranks": 2},
    "make_plan": {"pattern": ra.Causal(), "tokens": 8, "ranks": 2},
    "make_plans": {"patterns": [ra.Causal()], "tokens": 8, "ranks": 2},
    "mix": {},
    "parse_pattern": {"text": "Causal()"},
    "predict": {"plan": PLAN, "machine": ra.get_machine("cpu")},
    "selective_scan": {**dict.fromkeys(("x", "dt", "B", "C"), ROWS), "A": ROWS[0, :2], **STATES},
    "simulate": {"plan": PLAN, "machine": "cpu"},
    "ssd": {"x": Q.transpose(1, 2), "dt": ROWS, "A": ROWS[0, 0], **dict.fromkeys("BC", ROWS[:, :, None]), **STATES},
    "strided_blocks": {"block": 4, "stride": 2},
    "synchronize": {},
    "top_keys": {**{name: Q for name in "qk"}, "weights": Q[..., 0], "count": 2, "pattern": "Causal()", **TWO_RANKS},
    "top_k": {"block": 4, "k": 1, "scores": [[1.0]]},
    "virtual_attention": {**CALL, "ranks": 2},
}


def refused(call: Callable[[], object]) -> bool:
    """Whether a call is refused, in one line. Any other error fails."""
    try:
        call()
    except ra.RingAttentionError as error:
        return "\n" not in str(error) or pytest.fail(f"several lines: {error}")
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_an_argument_of_a_wrong_type_is_refused(name: str) -> None:
    function, right = getattr(ra, name), RIGHT[name]
    kinds = inspect.signature(function).parameters.values()
    named = [kind.name for kind in kinds if kind.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)]
    calls = [lambda key=key, wrong=wrong: function(**{**right, key: wrong}) for key in named for wrong in WRONG]
    calls += [lambda wrong=wrong: function(wrong) for wrong in WRONG] if not named else []
    assert sum(map(refused, calls)) > len(calls) // 4


@pytest.mark.parametrize("name", ["affine_scan", "causal_conv1d", "gated_delta_rule", "selective_scan", "ssd"])
def test_recurrent_layers_take_dense_tensors_and_functions(name: str) -> None:
    function, right = getattr(ra, name), RIGHT[name]
    function(**right)
    first, *others = [key for key, value in right.items() if isinstance(value, torch.Tensor)]
    for key, wrong in ((first, right[first].to_sparse()), ("padding", torch.zeros(1, 8)), ("documents", Q)):
        assert refused(lambda key=key, wrong=wrong: function(**{**right, key: wrong}))  # type: ignore[misc]
    assert refused(lambda: function(**{**right, "padding": torch.zeros(1, 8, dtype=torch.int64)}))
    assert all(refused(lambda key=key: function(**{**right, key: right[key].long()})) for key in others)  # type: ignore[misc]
    if "function" in inspect.signature(function).parameters:
        assert refused(lambda: function(**{**right, "function": Q}))


def test_numbers_of_thousands_of_digits_are_refused() -> None:
    huge, heads = 10**5000, {"embed_dim": 8, "num_heads": 2}
    for number in (huge, -huge, 1 << 1100, 1 << 62):
        for name in ("embed_dim", "num_heads", "kv_heads"):
            given = {**heads, name: number}
            for adaptive in (False, True):
                more = {"adaptive": True, "k": 1} if adaptive else {}
                assert refused(lambda given=given, more=more: ra.create_multihead_block_sparse(**given, **more))  # type: ignore[misc]
    for number in (huge, -huge, 1 << 1100):
        for name in ("scale", "softcap", "dropout"):
            assert refused(lambda name=name, number=number: ra.attention(**{**CALL, name: number}))  # type: ignore[misc]
        assert refused(lambda number=number: ra.gated_delta_rule(**{**RIGHT["gated_delta_rule"], "scale": number}))  # type: ignore[misc]
    assert refused(lambda: ra.attention(**CALL, offload="host", chunk=-huge))


def test_a_value_is_shown_in_one_short_line() -> None:
    for value in (*WRONG, -(10**5000), "a\n" * 300, list(range(1000)), torch.zeros(40, 40)):
        assert "\n" not in shown(value) and len(shown(value)) < 400
    assert shown([1, "x"]) == "[1, 'x']" and shown(3) == "3"
