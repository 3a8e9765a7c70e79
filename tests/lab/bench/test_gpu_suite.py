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

from ringattn import Causal, Pattern
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
    monkeypatch.setattr(gpu, "KERNELS", ("aten_cuda",))  # Triton's interpreter is slow: only the merge has kernel visit
    device = SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    monkeypatch.chdir(tmp_path)


def rows_of(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    return {(case["case"], row["what"]): row for case in record["cases"] for row in case.get("summary", ())}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_suite_from_start_to_end(emulated: None, tmp_path: Path) -> None:
    main(ReportConfig("gpu_quick", repeat=1, output=OutputGroup("results")))
    (data,) = (tmp_path / "results").glob("*.jsonl")
    record, text = read_results(data), data.with_suffix(".html").read_text()
    assert "17 of 17 cases measured" in text and "target met." in text
    rows = rows_of(record)
    masks = ("dense", "causal", "window", "documents", "dilated", "block_sparse")
    for direction in ("forward", "backward"):
        for mask in masks:
            for column in ("matmul", "ringattn", "aten_cuda", "cuDNN", "flash", "FlexAttention"):
                row = rows[f"{mask}_{direction}", column]
                ran = bool(row["TFLOP/s"] and row["of matmul"] and row["peak"])
                assert ran != row["remark"].startswith("cannot run: "), row
                lacks = {"cuDNN": True, "flash": mask in masks[4:], "FlexAttention": direction == "backward"}
                assert ran != lacks.get(column, False), row  # FlexAttention has no backward on a CPU
        assert rows[f"ring_causal_{direction}", "virtual ring of 8"]["TFLOP/s"]
    assert rows["merge_forward", "merging visit"]["ms"] and rows["merge_forward", "first visit"]["ms"]
    ratios = {(case["case"], row["ratio"]): row["target"] for case in record["cases"] for row in case["ratios"]}
    assert ratios["ring_causal_forward", "ringattn / virtual ring of 8"] == pytest.approx(1 / 2.2)
    assert ratios["window_forward", "FlexAttention / ringattn"] == pytest.approx(1 / 1.1)


def test_what_fails_is_said_and_the_rest_goes_on(
    emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = gpu.attention

    def attend(*args: Any, pattern: Pattern, **options: Any) -> torch.Tensor:
        return real(*args, pattern=pattern, **options) * (1.0 if pattern == Causal() else 1.1)

    monkeypatch.setattr(gpu, "attention", attend)
    cases = ["window_forward", "causal_forward"]
    config = ReportConfig("gpu_quick", cases, 1, OutputGroup("results"))
    with pytest.raises(BenchFailure, match="1 case failed: window_forward"):
        main(config)
    (data,) = (tmp_path / "results").glob("*.jsonl")
    record = read_results(data)
    failed = record["cases"][0]["failed"]
    assert failed["class"] == "WrongResult" and failed["message"].startswith("results differ by more than 0.02: {'ring")
    assert len(rows_of(record)) == 6 and not gpu.conclude(record["cases"])[1]


def test_a_library_that_is_wrong_is_not_timed(emulated: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """cuDNN's gradients were wrong on an H200, which lost the times of all columns."""
    monkeypatch.setattr(gpu, "make_call", lambda library, **options: lambda q, k, v: (q * k + v).sin())
    main(ReportConfig("gpu_quick", ["causal_forward"], 1, OutputGroup("results")))
    (data,) = (tmp_path / "results").glob("*.jsonl")
    rows = rows_of(read_results(data))
    assert rows["causal_forward", "ringattn"]["ms"] and not rows["causal_forward", "flash"]["ms"]
    assert rows["causal_forward", "flash"]["remark"].startswith("not timed, because it is wrong by ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="suite=gpu: this process sees no CUDA device"):
        main(ReportConfig("gpu", output=OutputGroup(str(tmp_path / "results"))))
    assert [case.name for case in get_cases("gpu")] == [case.name for case in get_cases("gpu_quick")]
