"""ringattn run offload=host|disk as a user meets it: files by rows, whole or not at all."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import command_line
import pytest
import torch
from oracle import Case, Result, dense, error, errors, make_case
from safetensors.torch import load_file, save_file

import ringattn as ra
from ringattn.cli.config.schema import InputGroup, PatternGroup, RunConfig, RunOutputGroup, TransportGroup
from ringattn.cli.inputs import open_source
from ringattn.cli.run import main
from ringattn.errors import InvalidInput, RingAttentionError

TOKENS = 301


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results, in that of the test, which calls start in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def stored(folder: Path, dtype: torch.dtype, *, dout: bool = True, tokens: int = TOKENS) -> Case:
    case = make_case(tokens, 4, 2, dtype, dim=8, value_dim=6)
    names = ("q", "k", "v", "dout") if dout else ("q", "k", "v")
    save_file(dict(zip(names, (*case.inputs, case.grad), strict=False)), folder / "in.safetensors")
    return case


DISK = ("offload=disk", "input=file", "input.path=in.safetensors", "output.path=results/out.safetensors", "repeat=1")


@pytest.mark.parametrize(
    ("pattern", "dtype", "tolerance"),
    [
        ("Causal() & Window(70)", torch.float64, 1e-12),
        ("Dilated((64, 301), (1, 3), mix='group')", torch.float32, 1e-6),
        ("Causal()", torch.bfloat16, 8e-3),
    ],
)
def test_disk_round_trip(
    pattern: str, dtype: torch.dtype, tolerance: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = stored(tmp_path, dtype)
    main(config(offload="disk", path="results/out.safetensors", backward=True, pattern=PatternGroup(pattern)))
    printed = capsys.readouterr().out
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["out.safetensors"]
    found = load_file(tmp_path / "results/out.safetensors")
    seen = ra.parse_pattern(pattern)
    truth = dense(case, torch.from_numpy(seen.mask(TOKENS, 4)), seen.bind(4, TOKENS).output_scale)
    mine = Result(found["out"], found["lse"], tuple(found[name] for name in ("dq", "dk", "dv")))
    assert max(errors(mine, truth)) <= tolerance
    seeing = truth.lse != -torch.inf
    assert torch.equal(mine.lse != -torch.inf, seeing)
    assert float((mine.lse - truth.lse)[seeing].abs().max()) <= max(tolerance, 1e-5)
    gathered = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in (mine.out, mine.lse, *mine.grads)] == [dtype] + [gathered] * 4
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 6, "dtype": dtype, "batch": 2}
    plan = ra.make_plan(seen, tokens=TOKENS, ranks=5, layout="contiguous", schedule="direct", **sizes)
    assert f"forward bytes copied        {plan.bytes_sent():,} = " in printed and "(as planned;" in printed
    assert "NOT AS PLANNED" not in printed
    assert "offloaded, from in.safetensors in 5 chunks of at most 61 rows on cpu" in " ".join(printed.split())
    shown = re.search(r"error +(\S+) of the largest output", printed)
    assert shown is not None and float(shown[1]) <= tolerance


def test_host(tmp_path: Path) -> None:
    command = (
        "run threads=1 offload=host chunk=128 output.path=a.safetensors 'pattern=Causal() & Window(70)' input=random "
        "tokens=500 heads=4 kv_heads=2 head_dim=8 repeat=1 backward=true"
    )
    done = command_line.ringattn(command, cwd=tmp_path)
    assert "offloaded, from host memory in 4 chunks of at most 125 rows on cpu" in " ".join(done.stdout.split())
    assert "backward bytes copied" in done.stdout and "NOT AS PLANNED" not in done.stdout
    source = open_source(RunConfig(input=InputGroup("random"), tokens=500, heads=4, kv_heads=2, head_dim=8))
    q, k, v = (source.rows(name, range(500)) for name in "qkv")
    truth = dense(Case(q, k, v, q), torch.from_numpy((ra.Causal() & ra.Window(70)).mask(500, 4)))
    found = load_file(tmp_path / "a.safetensors")
    assert error(found["out"], truth.out) <= 1e-6 and error(found["lse"], truth.lse) <= 1e-6


# Shells tell death by SIGINT as 130, too: Python ends so if the interrupt met code that `exec` had got as a string,
# as dataclasses are made, even though it was handled.
@pytest.mark.parametrize(
    ("number", "statuses", "words"),
    [(signal.SIGINT, (130, -signal.SIGINT), b"interrupted"), (signal.SIGTERM, (143,), b"")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_run_that_is_ended_leaves_no_file(
    tmp_path: Path, results: Path, number: signal.Signals, statuses: tuple[int, ...], words: bytes
) -> None:
    stored(tmp_path, torch.float32, tokens=2000)
    (results / "out.safetensors").write_text("from before")
    run = subprocess.Popen(
        [sys.executable, "-m", "ringattn", "run", "threads=1", *DISK, "chunk=20", "repeat=100000"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # jobs in the background ignore it
    )
    try:
        deadline = time.monotonic() + 100
        while len(list(results.iterdir())) < 2 and time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.05)
        assert run.poll() is None and len(list(results.iterdir())) == 2, "results are being written"
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode in statuses and words in told and b"Traceback" not in told
    assert [p.name for p in results.iterdir()] == ["out.safetensors"]
    assert (results / "out.safetensors").read_text() == "from before"


def test_a_full_disk_leaves_no_file(tmp_path: Path, results: Path) -> None:
    stored(tmp_path, torch.float32)
    words = ("run", *DISK, "hydra.output_subdir=null", "hydra/job_logging=none")
    done = command_line.ringattn(*words, cwd=tmp_path, largest=20_000, status=2)
    assert "results (File too large); give another output.path=" in done.stderr
    assert not list(results.iterdir())


def config(**options: object) -> RunConfig:
    """What the command line gives `main`, of a small causal run on files in the working directory."""
    base = {"input": InputGroup("file", "in.safetensors"), "threads": torch.get_num_threads(), "repeat": 1, "chunk": 64}
    output = RunOutputGroup(options.pop("path", None))  # type: ignore[arg-type]
    return RunConfig(output=output, **{**base, **options})  # type: ignore[arg-type]


WRITTEN = {"offload": "disk", "path": "results/x.safetensors"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": "tape"}, "offload=tape: expected one of host, disk"),
        ({"offload": "disk", "input": InputGroup("text")}, "offload=disk reads input=file input.path=..., not input=t"),
        ({"offload": "disk"}, "give its path with output.path="),
        ({**WRITTEN, "backward": True}, "no tensor 'dout', the gradient of the output"),
        (
            {**WRITTEN, "backward": True, "input": InputGroup("file", "short.safetensors")},
            "dout must be torch.float32 (2, 4, 301, 6) like out, but is torch.float32 (2, 4, 300, 6)",
        ),
        ({"offload": "disk", "path": "no/x.safetensors"}, "the folder no does not exist"),
        ({"offload": "host", "chunk": 0}, "chunk=0 must be an integer >= 1"),
        ({"offload": "host", "chunk": "many"}, "chunk=many: not a whole number"),
        ({"offload": "host", "device": "tpu"}, "device='tpu' is not a device"),
        ({"offload": "host", "transport": TransportGroup("virtual")}, "transport=virtual has no meaning with offload"),
    ],
)
def test_wrong_calls(options: dict[str, object], words: str, tmp_path: Path, results: Path) -> None:
    case = stored(tmp_path, torch.float32, dout=False)
    tensors = dict(zip("qkv", case.inputs, strict=True), dout=case.grad[:, :, 1:].clone())
    save_file(tensors, tmp_path / "short.safetensors")
    with pytest.raises(RingAttentionError, match=re.escape(words)):
        main(config(**options))
    assert not list(results.iterdir())


def test_stream_is_not_for_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match="offload=host runs in one process; start ringattn run without torchrun"):
        main(config(offload="host"))
    with pytest.raises(InvalidInput, match="transport=virtual runs in one process; start ringattn run without"):
        main(config(chunk=None, transport=TransportGroup("virtual")))
