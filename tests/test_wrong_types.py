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
#: Arguments that each function accepts. Recurrent layers are not here: they report an error to all ranks.
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
    "attention": CALL,
    "auto_batch_size": {"call": lambda batch: batch, "start": 2},
    "create_block_sparse_attention": {"block": 4, **SEGMENTS},
    "create_dilated_attention": SEGMENTS,
    "create_multihead_block_sparse": {"embed_dim": 8, "num_heads": 2},
    "create_multihead_dilated_attention": {"embed_dim": 8, "num_heads": 2, **SEGMENTS},
    "dilated_blocks": {"block": 4, "offsets": (0, 1)},
    "from_block_mask": {"mask": None},
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
    "simulate": {"plan": PLAN, "machine": "cpu"},
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


def test_a_value_is_shown_in_one_short_line() -> None:
    for value in (*WRONG, -(10**5000), "a\n" * 300, list(range(1000)), torch.zeros(40, 40)):
        assert "\n" not in shown(value) and len(shown(value)) < 400
    assert shown([1, "x"]) == "[1, 'x']" and shown(3) == "3"
