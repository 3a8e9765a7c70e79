"""`ringattn run mode=decode`: a prompt in chunks, then new tokens, on ranks and on virtual ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Inside, ringattn


@pytest.mark.parametrize("transport", ["gloo", "virtual"])
def test_new_tokens_are_those_of_the_oracle(transport: str, inside: Inside, tmp_path: Path) -> None:
    options = ["context=90", "new=5", "chunk=32", "heads=4", "kv_heads=2", "head_dim=8", "ranks=3", "merge=scatter"]
    call = ["run", "mode=decode", f"transport={transport}", "output.report=r.json", "layout=zigzag", *options]
    done = (ringattn if transport == "gloo" else inside)(*call, cwd=tmp_path)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["error"] < 1e-5 and len(record["step_seconds"]) == 5
    row_bytes = 4 * (8 + 1) * 4
    assert record["messages_per_token"] == [4] * 3 and sum(record["bytes_per_token"]) == 4 * row_bytes
    assert "bytes of a token" in done.stdout and "counted" in done.stdout
