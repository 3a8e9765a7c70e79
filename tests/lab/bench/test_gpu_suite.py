"""Suite "gpu" from start to end on emulated ops, so that a first run on a GPU can fail on numbers only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_device import DEVICE, emulate_device
from torch.nn.attention import varlen

from ringattn.cli.config.groups import OutputGroup
from ringattn.errors import BenchFailure, LaunchFailure, Unsupported
from ringattn.lab.bench import get_cases, runner
from ringattn.lab.bench.records import read_results
from ringattn.lab.bench.suites import gpu
from ringattn.lab.verbs.report import main
from ringattn.lab.verbs.settings import ReportConfig

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="scripts/gpu runs the suite itself")


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *rest: Any, window_size: tuple[int, int]
) -> torch.Tensor:
    """torch's varlen_attn by dense masks: [T, H, D], a document from each of `starts` to the next."""
    rows = torch.arange(len(q))
    number, distance = torch.bucketize(rows, starts, right=True), rows[:, None] - rows
    left, right = window_size
    seen = (number[:, None] == number) & ((left < 0) | (distance <= left)) & ((right < 0) | (-distance <= right))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen)[0].transpose(0, 1)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The suite on CPU tensors in this process, with FlexAttention that is not compiled."""
    emulate_device(monkeypatch)

    def run_here(work: Callable[..., Any], ranks: int, *args: Any, timeout: float) -> list[Any]:
        try:
            return [work(0, *args)]
        except AssertionError as error:  # as a process fails
            raise LaunchFailure(f"rank 0 failed:\n{error}") from error

    signature = inspect.signature(varlen.varlen_attn)
    checked = lambda *args, **options: signature.bind(*args, **options) and packed_attention(*args, **options)  # noqa: E731
    monkeypatch.setattr(varlen, "varlen_attn", checked)
    monkeypatch.setattr(runner, "run_local", run_here)
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    device = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.chdir(tmp_path)


def rows_of(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    return {(case["case"], row["what"]): row for case in record["cases"] for row in case.get("summary", ())}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_suite_from_start_to_end(emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = gpu.attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Any, **options: Any) -> torch.Tensor:
        if "long" in tries and "offload" not in options and q.shape[2] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(q, k, v, pattern, **options)

    tries: list[str] = []
    try_length = gpu._try_length
    monkeypatch.setattr(gpu, "_try_length", lambda *args: (tries.append("long"), try_length(*args), tries.clear())[1])
    monkeypatch.setattr(gpu, "attention", attend)
    main(ReportConfig("gpu_quick", repeat=1, output=OutputGroup("results")))
    (data,) = (tmp_path / "results").glob("*.jsonl")
    record, text = read_results(data), data.with_suffix(".html").read_text()
    assert "19 of 19 cases measured" in text and "target met." in text
    rows = rows_of(record)
    masks = ("dense", "causal", "window", "documents", "dilated", "block_sparse")
    for direction in ("forward", "backward"):
        for mask in masks:
            for column in ("matmul", "ringattn", "cuDNN", "flash", "FlexAttention"):
                row = rows[f"{mask}_{direction}", column]
                ran = bool(row["TFLOP/s"] and row["of matmul"] and row["peak"])
                assert ran != row["remark"].startswith("cannot run: "), row
                lacks = {"cuDNN": True, "flash": mask in masks[4:], "FlexAttention": direction == "backward"}
                assert ran != lacks.get(column, False), row  # FlexAttention has no backward on a CPU
        assert rows[f"ring_causal_{direction}", "virtual ring of 8"]["TFLOP/s"]
        capped, offloaded = (row for (case, _), row in rows.items() if case == f"longest_{direction}")
        assert "longest, 2 heads of 16: 96 tokens; 112 do not fit" in capped["remark"]
        assert "128 tokens; nothing longer than 128 was tried" in offloaded["remark"]
    (dilated,) = (row for (case, _), row in rows.items() if case == "dilated_tokens")
    assert "all queries of 1,024 tokens, 2 heads of 16, in 4 chunks of 256" in dilated["remark"]


def test_what_fails_is_said_and_the_rest_goes_on(
    emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = gpu.attention
    monkeypatch.setattr(gpu, "attention", lambda *args, **options: real(*args, **options) * 1.1)
    cases = ["window_forward", "longest_forward", "dilated_tokens"]
    config = ReportConfig("gpu_quick", cases, 1, OutputGroup("results"))
    with pytest.raises(BenchFailure, match="2 cases failed: window_forward, dilated_tokens"):
        main(config)
    (data,) = (tmp_path / "results").glob("*.jsonl")
    record = read_results(data)
    failed = record["cases"][0]["failed"]
    assert failed["class"] == "WrongResult" and failed["message"].startswith("results differ by more than 0.02: {'ring")
    assert len(rows_of(record)) == 2 and not gpu.conclude(record["cases"])[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="suite=gpu: this process sees no CUDA device"):
        main(ReportConfig("gpu", output=OutputGroup(str(tmp_path / "results"))))
    assert [case.name for case in get_cases("gpu")] == [case.name for case in get_cases("gpu_quick")]
    assert gpu.Sizes().long[0] == 1_073_741_824 and gpu.Sizes().cap == 8 << 30
