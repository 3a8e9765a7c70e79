"""The command line as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Inside, Refused, ringattn
from safetensors.torch import load_file, save_file

import ringattn as ra
from ringattn.cli import doctor, run
from ringattn.cli.comparison import MAX_ROWS, print_jobs
from ringattn.cli.config.schema import SCHEMAS, RunConfig, parse_size
from ringattn.errors import InvalidInput
from ringattn.kernels import visit
from ringattn.lab.published.predictions import read_measurements
from ringattn.lab.verbs import score
from ringattn.lab.verbs.settings import ScoreConfig
from ringattn.text import duration, size


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("64k", 65536), ("1M", 1 << 20), ("2G", 2 << 30), ("1e9", 10**9), ("1_000", 1000), ("1.5k", 1536)],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    ("text", "problem"),
    [*((x, "not a whole number") for x in ("", "1.5", "ten", "1e-3", "1e99999")), ("-4k", "is negative")],
)
def test_wrong_sizes(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"chunk={text}: {problem}; write 4096"):
        parse_size(text, "chunk")


def test_a_plan_of_too_many_steps_says_so(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "tokens=1073741824", "ranks=32768", "schedule=ring", "layout=contiguous")
    assert "too many steps to draw or count" in done.stdout and "rank 0" not in done.stdout
    done = inside("plan", "tokens=1G", "ranks=256k", "pattern=window", "layout=contiguous")
    assert "rank 245760" in done.stdout


def test_plan_prints_counted_facts_and_writes_json(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "ranks=4", "tokens=1k", "heads=1", "layout=zigzag", "output.path=p.json")
    plan = ra.make_plan(ra.Causal(), tokens=1024, ranks=4, layout="zigzag")
    assert ra.Plan.from_json((tmp_path / "p.json").read_text()) == plan
    for fact in (plan.picture().splitlines()[1], f"{plan.pairs():,}", f"{plan.pairs(2):,}", plan.hash, "[counted]"):
        assert fact in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json"], "plan leaves nothing else behind"


def test_a_plan_of_latents(inside: Inside, refused: Refused, tmp_path: Path) -> None:
    """A layer of DeepSeek-V3, whose latents travel: in counts, in the listing of a rank, and in a simulation."""
    sizes = ("ranks=4", "tokens=1k", "heads=128", "head_dim=192", "value_dim=128", "dtype=bfloat16", "schedule=ring")
    block = "block=[[1, 512], [1, 64]]"
    plan = ra.make_plan(
        ra.Causal(), tokens=1024, ranks=4, layout="zigzag", schedule="ring", dtype="bfloat16",
        heads=128, head_dim=192, value_dim=128, block=((1, 512), (1, 64)),
    )  # fmt: skip
    done = inside("plan", *sizes, block, "layout=zigzag", "output.path=p.json")
    assert ra.Plan.from_json((tmp_path / "p.json").read_text()) == plan
    assert "1 x 512 bfloat16 + 1 x 64 bfloat16 of each key travels instead of k and v" in done.stdout
    listed = json.loads(inside("plan", *sizes, block, "layout=zigzag", "rank=1", "--json").stdout)
    assert listed == plan.listing(1).record and listed["block"] == [[1, 512, "bfloat16"], [1, 64, "bfloat16"]]
    assert "kv is a block of 1 x 512 bfloat16 + 1 x 64 bfloat16, not k and v" in str(plan.listing(1))
    timed = json.loads(inside("simulate", *sizes, block, "layout=zigzag", "machine=h100_nvlink_ib", "--json").stdout)
    assert timed["passes"]["forward"]["seconds"] == ra.simulate(plan, "h100_nvlink_ib").seconds
    assert "block=5: expected (heads, width)" in refused("plan", "block=5")
    assert "block is a key of ringattn plan and simulate, not of" in refused("verify", "block=[[1, 8]]")


def test_a_plan_of_a_chunk_after_a_cache(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "ranks=4", "tokens=1k", "heads=1", "q_tokens=64", "layout=zigzag", "output.path=p.json")
    assert "64 query tokens, shifted(zigzag, 960), and 1,024 keys, zigzag on 4 ranks" in done.stdout
    plan = ra.Plan.from_json((tmp_path / "p.json").read_text())
    assert plan == ra.make_plan(ra.Causal(), tokens=1024, q_tokens=64, ranks=4, layout="zigzag", q_layout=plan.q_layout)
    assert f"{plan.forward_rotates} rotate in the forward, {plan.rotates} rotate in the backward" in done.stdout
    last = inside("plan", "ranks=4", "tokens=1k", "heads=1", "q_first=960", "layout=zigzag")
    assert plan.hash in last.stdout and plan.hash in done.stdout


#: A plan of two documents.
DOCUMENTS = ("plan", "ranks=4", "tokens=1000", "pattern=Documents([700, 300])")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--help",), "ringattn <verb>"),
        (("help",), "ringattn <verb>"),
        (("--version",), ra.__version__),
        (("run", "--cfg", "job", "--resolve"), "spec: Causal()"),
        (("plan", "--help"), "(--help GROUP): pattern=causal layout=contiguous"),
        (("help", "run", "machine"), "machine.latency=null"),
        ((*DOCUMENTS, "layout=balanced"), "balanced(1) on 4 ranks"),
        ((*DOCUMENTS, "layout=balanced", "layout.chunk=50"), "balanced(50) on 4 ranks"),
        ((*DOCUMENTS, "layout=balanced(20)"), "balanced(20) on 4 ranks"),
        ((*DOCUMENTS, "layout=rows(400,300,0,300)"), "rows(400, 300, 0, 300) on 4 ranks"),
        (("plan", "experiment=window_64k"), "over 65,536 tokens, contiguous on 4 ranks"),
        (("simulate", "machine.memory=8G", "ranks=2"), "8.0 GiB"),
        (("simulate", "ranks=1", "tokens=64"), "over 64 tokens, contiguous on 1 rank, ring, B=1 H=8 K=8 D=64 float32"),
    ],
)
def test_help_and_short_calls(arguments: tuple[str, ...], words: str, inside: Inside, tmp_path: Path) -> None:
    done = inside(*arguments)
    assert not done.stderr and words in done.stdout


def test_without_a_verb_the_help_is_an_error(inside: Inside, tmp_path: Path) -> None:
    done = inside(status=2)
    assert not done.stderr and "doctor" in done.stdout


def test_a_job_for_each_value(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "-m", "ranks=2,3", "tokens=64")
    assert "on 2 ranks" in done.stdout and "on 3 ranks" in done.stdout


def test_the_masks_of_a_model_share_one_layout(inside: Inside, refused: Refused, tmp_path: Path) -> None:
    sizes = "ranks=4", "tokens=512", "heads=1", "layout=balanced(8)", "schedule=auto"
    several = "pattern=[Causal() & Window(15), Causal()]", *sizes
    done = inside("plan", *several, "pattern.weights=[5,1]", "output.path=plans.json")
    plans = ra.make_plans(
        ["Causal() & Window(15)", "Causal()"], [5, 1], tokens=512, ranks=4, layout="balanced(8)", schedule="auto"
    )
    rows = last_table(done, "masks [counted]")[1:]
    assert [row[:3] for row in rows] == [
        [f"{i}", f"{p.pairs():,}", f"{p.imbalance:.4f}"] for i, p in enumerate(plans, 1)
    ]
    texts = [json.dumps(mask) for mask in json.loads((tmp_path / "plans.json").read_text())["masks"]]
    assert [ra.Plan.from_json(text) for text in texts] == [*plans]
    done = inside("simulate", *several, "backward=true")
    assert [row[0] for row in last_table(done, "masks: imbalance [counted], times [modelled]")[1:]] == ["1", "2"]
    done = inside("plan", "-m", *several, "pattern.weights=[1,0],[0,1]")
    rows = last_table(done, "jobs: times and errors [measured], other numbers [counted]")
    assert [row[0] for row in rows[1:]] == ["[1,0]", "[0,1]"] and float(rows[1][-3]) > float(rows[2][-3]), rows
    documents = "pattern=hybrid", "pattern.lengths=[300,212]", "pattern.left=9", *several[1:]
    done = inside("plan", *documents)
    assert len(last_table(done, "masks [counted]")) == 3, done.stderr
    for words, says in (
        (("run", *several[:3]), "2 patterns where one is expected"),
        (("simulate", *several, "output.path=x.json"), "output.path=x.json has no meaning with several patterns"),
        (("plan", *several, "pattern.weights=[1]"), "give a list of patterns and the number of layers of each"),
        (("plan", "pattern=Causal()", "pattern.weights=[1]"), "pattern.weights=[1] has no meaning with pattern=C"),
    ):
        assert says in refused(*words)


def last_table(done: subprocess.CompletedProcess[str], title: str) -> list[list[str]]:
    """The cells of the table that compares jobs, at the end of what is printed."""
    _, found, table = done.stdout.rpartition(f"\n{title}")
    assert found, done.stdout
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]]


def test_the_jobs_of_a_plan_end_in_a_table(inside: Inside, tmp_path: Path) -> None:
    written = "output.path=${hydra:job.num}.json"
    done = inside("plan", "-m", "pattern=Causal(),Causal() & Window(7)", "ranks=2", "tokens=64", written)
    header, *rows = last_table(done, "jobs")
    assert [row[0] for row in rows] == ["Causal()", "Causal() & Window(7)"] and "ranks" not in header
    for job, row in enumerate(rows):
        totals = json.loads((tmp_path / f"{job}.json").read_text())["counted"]["totals"]
        cells = dict(zip(header, row, strict=True))
        assert cells["pairs"] == f"{totals['pairs']:,}" and cells["imbalance"] == f"{totals['imbalance']:.4f}"
        assert cells["forward messages"] == str(totals["forward"]["messages"])
        assert cells["backward sends"] == size(totals["backward"]["bytes"])
    assert "jobs:" not in inside("plan", "-m", "ranks=2", "tokens=64").stdout, "a job has no other"
    for words in (("plan",), ("run", "transport=virtual", "threads=1", "repeat=1")):
        jobs = json.loads(inside(*words, "-m", "ranks=2,3", "tokens=64", "--json").stdout)
        assert len(jobs) == 2, "one document, and nothing else"


@pytest.mark.multi
@pytest.mark.parametrize("transport", ["gloo", "virtual"])
def test_the_jobs_of_a_run_end_in_a_table(transport: str, tmp_path: Path) -> None:
    options = ("tokens=64", "repeat=1", "input=random", f"transport={transport}")
    done = ringattn("run", "-m", "ranks=1,2", *options, "output.report=${hydra:job.num}.json", cwd=tmp_path)
    header, *rows = last_table(done, "jobs")
    assert header == ["ranks", "forward", "forward sent", "error"]
    for job, row in enumerate(rows):
        report = json.loads((tmp_path / f"{job}.json").read_text())
        forward = report["passes"]["forward"]
        numbers = [duration(forward["median"]), size(sum(forward["bytes_sent"])), f"{report['error']:.2e}"]
        assert row == [str(job + 1), *numbers]


def test_the_points_of_a_study_end_in_a_table(inside: Inside, tmp_path: Path) -> None:
    options = ("tokens=4k", "machine=h100_nvlink_ib", "plots=[]", "output.path=made")
    done = inside("study", "ranks=1,8", "backward=false,true", *options)
    header, *rows = last_table(done, "points [modelled]")
    assert header == ["ranks", "backward", "time", "exposed", "memory of a rank"]
    points = json.loads((tmp_path / "made" / "summary.json").read_text())["rows"]
    for point, row in zip(points, rows, strict=False):
        passes = [name for name in ("forward", "backward") if f"{name} time" in point]
        time, compute = (sum(point[f"{name} {what}"] for name in passes) for what in ("time", "compute"))
        memory = size(max(point[f"{name} memory"] for name in passes))
        assert row[2:] == [duration(time), duration(max(time - compute, 0.0)), memory]
    assert len(rows) == 5, "four points, and where the files are"


def test_the_jobs_of_numerics_end_in_a_table(inside: Inside, tmp_path: Path) -> None:
    written = "output.path=${hydra:job.num}.json"
    done = inside("verify", "-m", "ranks=2,3", "tokens=64", written)
    header, *rows = last_table(done, "jobs")
    assert header == ["ranks", "time", "error"]
    for job, row in enumerate(rows):
        report = json.loads((tmp_path / f"{job}.json").read_text())
        assert row[1:] == [duration(report["seconds"]), f"{report['error']:.2e}"]


def test_a_long_table_ends_with_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_jobs([({"ranks": str(ranks)}, {"time": "1 s"}) for ranks in range(MAX_ROWS + 7)], "points", " in a.csv")
    *_, last, more = capsys.readouterr().out.splitlines()
    assert last.split() == [str(MAX_ROWS - 1), "1", "s"] and more == "and 7 more in a.csv"


def test_published_measurements_tell_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alike = [row for row in read_measurements() if row.family == "magi-h100"][:4]
    monkeypatch.setattr(score, "read_measurements", lambda: alike)
    config = ScoreConfig()
    config.output.path = str(tmp_path / "errors.json")
    score.main(config)
    captured = capsys.readouterr()
    assert "ringattn: measurements: 3 of 4" in captured.err
    words = " ".join(captured.out.split())
    assert "of 41 forecasts, not scored, as their source was public or read: 1, 2, 3, 4, 5, 6, 7" in words
    written = json.loads((tmp_path / "errors.json").read_text())
    assert len(written["predictions"]) == 4 and written["families"]["magi-h100"]["unseen"]["rows"] == 4


def test_doctor(inside: Inside, tmp_path: Path) -> None:
    done = inside("doctor")
    for words in ("launcher", "none, rank 0 of 1", "gloo", "kernel aten_cpu", "pip install 'ringattn[mpi]'"):
        assert words in done.stdout or "mpi4py" in done.stdout
    assert "auto for dense" in done.stdout
    assert "merges on CUDA" in done.stdout and "GLOO_SOCKET_IFNAME" in done.stdout
    supposed = inside("doctor", "capability=7.5").stdout
    assert "auto, bfloat16 supposing 7.5" in supposed and "auto for window, float16 supposing 7.5" in supposed
    assert "kernel visit supposing 7.5" in supposed and "it needs compute capability 8.0" in supposed


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("version", "refused"), [((12, 8), True), ((13, 3), False)])
def test_doctor_says_why_the_visit_kernel_is_not_used(
    version: tuple[int, int], refused: bool, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor, visit):
        monkeypatch.setattr(module, "ptxas_version", lambda: version)
    visit.device_refuses.cache_clear()
    try:
        printed = " ".join(inside("doctor", "capability=9.0").stdout.split())
    finally:
        visit.device_refuses.cache_clear()
    assert f"ptxas {version[0]}.{version[1]}: /" in printed
    state = "ptxas 12.8 can silently corrupt" if refused else "ok; a self-test"
    assert f"kernel visit supposing 9.0 {state}" in printed
    for mask in ("window", "documents", "block mask"):
        for dtype in ("bfloat16", "float32"):
            text = printed.split(f"auto for {mask}, {dtype} supposing 9.0 ")[1].split("auto for")[0]
            assert text.startswith("one launch of kernel visit") != refused, text
            assert ("not visit: see kernel visit" in text) == refused, text
    text = printed.split("auto for causal, bfloat16 supposing 9.0 ")[1].split("auto for")[0]
    assert text.startswith("cudnn; ")


@pytest.mark.multi
def test_run_on_local_ranks_equals_virtual(inside: Inside, tmp_path: Path) -> None:
    save_file(inputs(600), tmp_path / "x.safetensors")
    common = [
        "input=file",
        f"input.path={tmp_path / 'x.safetensors'}",
        "repeat=1",
        "layout=zigzag",
        "pattern=window",
        "pattern.left=99",
    ]
    outs = {}
    for name, call, transport in (("local", ringattn, "gloo"), ("virtual", inside, "virtual")):
        options = ("ranks=2", "threads=1", f"transport={transport}", "output.path=y.safetensors")
        (folder := tmp_path / name).mkdir()
        done = call("run", *common, *options, cwd=folder)
        assert "[measured]" in done.stdout and "as planned" in done.stdout
        assert done.stdout.count("forward time") == 1, "only rank 0 prints"
        outs[name] = load_file(folder / "y.safetensors")
        assert len([*folder.glob("outputs/**/.hydra")]) == 1, "one run directory per job"
    assert all(torch.equal(outs["local"][key], outs["virtual"][key]) for key in ("out", "lse"))
    assert outs["local"]["out"].shape == (1, 4, 600, 8)


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses(2, ring)", "ulysses(4, ring)"])
def test_run_and_plan_tell_the_bytes_of_every_schedule(schedule: str, inside: Inside, tmp_path: Path) -> None:
    sizes = ("ranks=4", "tokens=200", "heads=4", "kv_heads=4", "pattern=full", "layout=contiguous")
    planned = inside("plan", *sizes, f"schedule={schedule}", "output.path=p.json")
    ran = inside("run", *sizes, f"schedule={schedule}", "transport=virtual", "repeat=1")
    sent = re.search(r"forward sends +\S+ \S+ = ([\d.]+) of a full ring", planned.stdout)
    assert sent and f"as planned; {float(sent[1]):.3f}"[:-1] in ran.stdout


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1, h, tokens, 8).to(dtype) for name, h in (("q", 4), ("k", 2), ("v", 2))}


def test_run_on_a_file(inside: Inside, tmp_path: Path) -> None:
    tensors = inputs(77, torch.bfloat16)
    save_file(tensors, tmp_path / "x.safetensors")
    done = inside(
        "run input=file input.path=x.safetensors ranks=2 transport=virtual threads=1 backward=true layout=striped "
        "repeat=1 output.path=y.safetensors"
    )
    wanted = ra.virtual_attention(*tensors.values(), ra.Causal(), ranks=2, layout="striped")
    assert torch.equal(load_file(tmp_path / "y.safetensors")["out"], wanted)
    assert "backward time" in done.stdout


def test_every_schema_has_its_config() -> None:
    root = Path(__file__).resolve().parents[2] / "conf"
    assert {path.stem for path in root.glob("*.yaml")} == {*SCHEMAS, "job", "quiet"}
    assert (
        " ".join(sorted(SCHEMAS))
        == "advise audit calibrate doctor estimate plan play report run score simulate study verify"
    )


@pytest.mark.parametrize(
    ("ranks", "threads", "numbers", "shared"),
    [
        (2, None, {}, (None, 1)),
        (4, None, {}, (2, 4)),
        (4, 2, {}, (1, 4)),
        (4, None, {"cores": 3}, (3, 4)),
        (4, None, {"ranks_per_node": 2}, (None, 2)),
    ],
)
def test_local_ranks_share_the_cores(
    ranks: int, threads: int | None, numbers: Any, shared: tuple[int | None, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `auto` hears of a machine of 2 cores; numbers that the user gives stay."""
    machines: list[ra.Machine] = []
    monkeypatch.setattr(run.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(run, "start_ranks", lambda config, *_: machines.append(config.machine.made(ranks=ranks)))
    config = RunConfig(ranks=ranks, threads=threads)
    vars(config.machine).update(numbers)
    run.main(config)
    assert (machines[0].cores, machines[0].ranks_per_node) == shared


def test_times_are_not_negative_and_a_sum_precedes_its_parts(inside: Inside, tmp_path: Path) -> None:
    numbers = ("machine.gamma=0.05", "machine.flops=2e13", "machine.merge=5e11")
    done = inside("simulate", "ranks=1", "heads=8", "tokens=4k", "backward=true", *numbers)
    assert not re.search(r"(?<![\de])-\d", done.stdout)
    assert done.stdout.index("memory of a rank") < done.stdout.index("  q, k, v")
