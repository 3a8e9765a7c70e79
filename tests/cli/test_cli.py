"""The command line as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command_line import Inside, ringattn, started
from safetensors.torch import load_file, save_file

import ringattn as ra
from ringattn.cli.config.schema import SCHEMAS, parse_size
from ringattn.errors import InvalidInput


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("64k", 65536), ("1M", 1 << 20), ("2G", 2 << 30), ("1e9", 10**9), ("1_000", 1000), ("1.5k", 1536)],
)
def test_sizes(text: str, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    ("text", "problem"),
    [*((x, "not a whole number") for x in ("", "1.5", "ten", "1e-3", "1e400")), ("-4k", "is negative")],
)
def test_wrong_sizes(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"chunk={text}: {problem}; write 4096"):
        parse_size(text, "chunk")


def test_a_plan_of_too_many_steps_says_so(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "tokens=1073741824", "ranks=262144", "schedule=ring", "layout=contiguous", cwd=tmp_path)
    assert done.returncode == 0 and "neither drawn nor counted" in done.stdout and "rank 0" not in done.stdout
    done = inside("plan", "tokens=1G", "ranks=256k", "pattern=window", "layout=contiguous", cwd=tmp_path)
    assert done.returncode == 0 and "rank 245760" in done.stdout


def test_plan_prints_counted_facts_and_writes_json(tmp_path: Path) -> None:
    done = ringattn("plan", "ranks=4", "tokens=1k", "layout=zigzag", "output.path=p.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = ra.make_plan(ra.Causal(), tokens=1024, ranks=4, layout="zigzag")
    assert ra.Plan.from_json((tmp_path / "p.json").read_text()) == plan
    for fact in (plan.picture().splitlines()[1], f"{plan.pairs():,}", f"{plan.pairs(2):,}", plan.hash, "[counted]"):
        assert fact in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json"], "plan leaves nothing else behind"


def test_balanced_layouts_are_written_in_three_ways(inside: Inside, tmp_path: Path) -> None:
    for override, name in (
        (("layout=balanced",), "balanced(31)"),
        (("layout=balanced", "layout.chunk=50"), "balanced(50)"),
        (("layout=balanced(20)",), "balanced(20)"),
    ):
        done = inside("plan", "ranks=4", "tokens=1000", "pattern=Documents([700, 300])", *override, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"{name} on 4 ranks" in done.stdout


def test_help_version_and_wrong_verbs(inside: Inside, tmp_path: Path) -> None:
    for arguments, code, words in (
        (("--help",), 0, "ringattn <verb>"),
        (("--version",), 0, ra.__version__),
        ((), 2, "doctor"),
        (("paln",), 2, "did you mean 'plan'?"),
        (("run", "--cfg", "job", "--resolve"), 0, "spec: Causal()"),
        (("plan", "--help"), 0, "pattern=causal | dilated | "),
        (("help",), 0, "ringattn <verb>"),
        (("help", "run", "machine"), 0, "machine.latency=null"),
        (("run", "--help", "machines"), 2, "takes the name of a group: pattern, layout"),
        (("run", "--ranks", "4"), 2, "--ranks: unknown option; write ranks=4; values"),
        (("simulate", "--tokens=4k"), 2, "write tokens=4k; values"),
        (("plan", "ranks=four"), 2, "ranks=four: expected a whole number, such as 8 or 64k"),
        (("plan", "ranks=1.5"), 2, "ranks=1.5: not a whole number; write 4096, 64k"),
        (("run", "wire_dtype=bfloat16"), 2, "Key 'wire_dtype' not in 'RunConfig'; did you mean 'comm_dtype'?"),
        (("run", "input.pth=x"), 2, "Key 'pth' not in 'InputGroup'; did you mean 'path'?"),
        (("run", "pattern=casual"), 2, "'pattern/casual'; did you mean 'causal'? expected one of causal, dilated"),
        (("run", "experiment=validate"), 2, "In 'experiment/validate': ConfigKeyError raised while composing config"),
        (("run", "input=file"), 2, "input=file needs input.path=..., a .safetensors or .npz file"),
        (("plan", "-m", "ranks=2,4", "output.path=p.json"), 2, "'output.path=p_${hydra:job.num}.json'"),
        (("simulate", "-m", "mode=numerics", "seed=1,2", "output.path=x.json"), 2, "every job would replace"),
        (("simulate", "-m", "experiment=validate", "heads=1,2"), 2, "study.axes={'heads': ['1', '2']} has no meaning"),
        (("plan", "output.path=/proc/p.json"), 2, "no file can be made in /proc"),
        (("run", "input=file", "input.path=./x.npz", "output.path=x.npz"), 2, "is the input, which would be lost"),
        (("run", "input=random", "output.path=x.pt"), 2, "output.path=x.pt: safetensors is what is written"),
        (
            ("run", "kernel=aten_cuda", "transport=virtual", "tokens=64", "input=random"),
            2,
            "needs tensors on a cuda device",
        ),
        (("plan", "pattern=Causal() & Windw(3)"), 2, "did you mean 'Window'"),
        (("plan", "experiment=window_64k"), 0, "over 65,536 tokens, contiguous on 4 ranks"),
        (("plan", "ranks=2", "output.path=no/such/p.json"), 2, "the folder no/such does not exist"),
        (("simulate", "backward=maybe"), 2, "backward=maybe: expected true or false"),
        (("calibrate", "rows=5"), 2, "rows=5: Invalid value assigned: int is not a ListConfig"),
        (
            ("plan", "machine.flops=fast"),
            2,
            "machine.flops=fast: expected a number, such as 2.5",
        ),
        (("bench", "suite=ring", "cases=[x]"), 2, "cases=x: unknown; expected some of dense_4096"),
        (("report", "standard", "longg"), 2, "Error parsing override 'longg' missing EQUAL"),
        (("report", "billion", "cases=x"), 2, "Key 'cases' not in 'SimulateConfig'"),
        (("report", "standard", "memory=8GB"), 2, "memory=8GB: not a whole number"),
        (("report", "compare=[old.jsonl]"), 2, "compare: expected two results"),
        (
            ("report", "--compare", "it's old.jsonl", "new.jsonl", "noise=0.2"),
            2,
            "compare=it's old.jsonl: no such file",
        ),
        (("plan", "--compare", "old.jsonl", "new.jsonl"), 2, "--compare is an option of ringattn report"),
        (("report", "results=old.jsonl"), 2, "results=old.jsonl: no such file"),
        (("simulate", "slow={1"), 2, "slow={1: no viable alternative at input '{1'"),
        (
            ("simulate", "tokens=${nope}"),
            2,
            "Interpolation key 'nope' not found; ringattn",
        ),
        (("simulate", "machine.memory=8G", "ranks=2"), 0, "8.0 GiB"),
        (
            ("simulate", "ranks=1", "tokens=64"),
            0,
            "over 64 tokens, contiguous on 1 rank, ring, B=1 H=1 K=1 D=64 float32",
        ),
    ):
        done = inside(*arguments, cwd=tmp_path)
        assert done.returncode == code, (arguments, done.stderr)
        assert words in done.stdout + done.stderr, (arguments, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr


def test_jobs_are_checked_before_the_first_runs(inside: Inside, tmp_path: Path) -> None:
    done = inside("plan", "-m", "ranks=2,3", "tokens=64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks" in done.stdout and "on 3 ranks" in done.stdout
    done = inside("plan", "-m", "ranks=2,two", "tokens=64", cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "ringattn: ranks=two: expected a whole number, such as 8 or 64k\n"


def test_doctor(inside: Inside, tmp_path: Path) -> None:
    done = inside("doctor", cwd=tmp_path)
    assert done.returncode == 0
    for words in ("launcher", "none, rank 0 of 1", "gloo", "kernel aten_cpu", "pip install 'ringattn[mpi]'"):
        assert words in done.stdout or "mpi4py" in done.stdout
    assert "auto for dense" in done.stdout
    supposed = inside("doctor", "capability=7.5", cwd=tmp_path).stdout
    assert "auto, bfloat16 supposing 7.5" in supposed and "auto for window, float16 supposing 7.5" in supposed
    wrong = inside("doctor", "capability=new", cwd=tmp_path)
    assert wrong.returncode == 2 and "expected a compute capability such as 9.0" in wrong.stderr


@pytest.mark.multi
def test_run_on_local_ranks_equals_torchrun_and_virtual(inside: Inside, tmp_path: Path) -> None:
    save_file(inputs(600), tmp_path / "x.safetensors")
    common = (
        "input=file",
        "input.path=x.safetensors",
        "repeat=1",
        "layout=zigzag",
        "pattern=window",
        "pattern.left=99",
    )
    outs = {}
    for name, arguments, launcher in (
        ("local", ("ranks=2", "threads=1"), {}),
        ("torchrun", (), {"launcher": torchrun(2)}),
        ("virtual", ("ranks=2", "transport=virtual", "threads=1"), {}),
    ):
        call = inside if name == "virtual" else started
        done = call("run", *common, *arguments, f"output.path={name}.safetensors", cwd=tmp_path, **launcher)
        assert done.returncode == 0, done.stderr
        assert "[measured]" in done.stdout and "as planned" in done.stdout
        assert done.stdout.count("forward time") == 1, "only rank 0 prints"
        outs[name] = load_file(tmp_path / f"{name}.safetensors")
    assert all(torch.equal(outs["local"][key], outs[name][key]) for name in outs for key in ("out", "lse"))
    assert outs["local"]["out"].shape == (1, 4, 600, 8)
    runs = [p for p in tmp_path.glob("outputs/**/.hydra")]
    assert len(runs) == 3, "one run directory per job, whatever the launcher"


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ulysses(2, ring)", "ulysses(4, ring)"])
def test_run_and_plan_tell_the_bytes_of_every_schedule(schedule: str, inside: Inside, tmp_path: Path) -> None:
    sizes = ("ranks=4", "tokens=200", "heads=4", "kv_heads=4", "pattern=full", "layout=contiguous")
    planned = inside("plan", *sizes, f"schedule={schedule}", "output.path=p.json", cwd=tmp_path)
    ran = inside("run", *sizes, f"schedule={schedule}", "transport=virtual", "repeat=1", cwd=tmp_path)
    assert planned.returncode == ran.returncode == 0, planned.stderr + ran.stderr
    sent = re.search(r"forward sends +\S+ \S+ = ([\d.]+) of a full ring", planned.stdout)
    assert sent and f"as planned; {float(sent[1]):.3f}"[:-1] in ran.stdout


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1, h, tokens, 8).to(dtype) for name, h in (("q", 4), ("k", 2), ("v", 2))}


def test_run_on_a_file(inside: Inside, tmp_path: Path) -> None:
    tensors = inputs(77, torch.bfloat16)
    save_file(tensors, tmp_path / "x.safetensors")
    done = inside(
        "run",
        "input=file",
        "input.path=x.safetensors",
        "ranks=2",
        "transport=virtual",
        "threads=1",
        "backward=true",
        "layout=striped",
        "repeat=1",
        "output.path=y.safetensors",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    wanted = ra.virtual_attention(*tensors.values(), ra.Causal(), ranks=2, layout="striped")
    assert torch.equal(load_file(tmp_path / "y.safetensors")["out"], wanted)
    assert "backward time" in done.stdout


def test_wrong_files_are_refused_and_nothing_is_written(inside: Inside, tmp_path: Path) -> None:
    good = inputs(40)
    save_file(good, tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    save_file({"q": good["q"], "k": good["k"]}, tmp_path / "two.safetensors")
    save_file({**good, "v": good["v"].double()}, tmp_path / "mixed.safetensors")
    save_file({**good, "k": good["k"][:, :, :39].contiguous()}, tmp_path / "short.safetensors")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 not whole")
    (tmp_path / "x.txt").write_text("no")
    for name, words in (
        ("none.safetensors", "no such file"),
        ("cut.safetensors", "not a whole safetensors file"),
        ("two.safetensors", "has no tensor 'v'"),
        ("mixed.safetensors", "do not fit each other"),
        ("short.safetensors", "do not fit each other"),
        ("cut.npz", "write the file again with numpy.savez"),
        ("x.txt", "expected a .safetensors or .npz file"),
    ):
        done = inside("run", "input=file", f"input.path={name}", "output.path=y.safetensors", cwd=tmp_path)
        assert done.returncode == 2 and words in done.stderr, (name, done.stderr)
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "y.safetensors").exists()


def test_an_unwritable_output_is_refused_before_the_run(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    done = inside("run", "ranks=2", "tokens=64", "output.path=folder.safetensors", cwd=tmp_path)
    assert done.returncode == 2 and "is a folder" in done.stderr


def test_text_that_is_too_short(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc")
    done = inside("run", "input.path=t.txt", "tokens=10", cwd=tmp_path)
    assert done.returncode == 2
    assert "has only 3 bytes; try tokens=3" in done.stderr


def test_every_schema_has_its_config() -> None:
    root = Path(__file__).resolve().parents[2] / "conf"
    assert {path.stem for path in root.glob("*.yaml")} == {*SCHEMAS, "job", "quiet"}
    assert json.dumps(sorted(SCHEMAS)) == '["advise", "calibrate", "doctor", "plan", "report", "run", "simulate"]'
