"""Parts that an installed package adds by entry points: patterns, schedules, kernels, transports, solvers, suites."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import ringattn

import ringattn.pattern as patterns
from ringattn.pattern import PATTERNS, Pattern

PARTS = '''
from dataclasses import dataclass

import numpy as np

from ringattn import Unsupported
from ringattn.lab.bench.case import BenchCase, BenchColumn, BenchSuite, Ratio
from ringattn.kernels.base import Kernel
from ringattn.kernels.reference import Reference
from ringattn.pattern import Pattern, make_tile
from ringattn.plan.schedules.direct import DirectSchedule


@dataclass(frozen=True)
class Recent(Pattern):
    """A query sees itself and the key before it."""

    def tiles(self, q, k, heads=range(1)):
        tile = make_tile(heads, q, k, 0, 1)
        if tile is not None:
            yield tile

    def visible(self, q, k, head, tokens):
        return (q - k >= 0) & (q - k <= 1)


class Star(DirectSchedule):
    """DirectSchedule under another name."""


class Counting(Kernel):
    """Reference that counts its calls, and computes fp64 only."""

    name, inner, calls = "counting", Reference(), 0

    def check(self, q, k, v):
        if str(q.dtype) != "torch.float64":
            raise Unsupported(f"kernel counting computes float64, got {q.dtype}")

    def split(self, work):
        return self.inner.split(work)

    def forward(self, *call):
        Counting.calls += 1
        return self.inner.forward(*call)

    def backward(self, *call):
        Counting.calls += 1
        return self.inner.backward(*call)


class Chosen(Counting):
    """Counting with two choices."""

    choices, split_for = ("fast", "exact"), set()

    @classmethod
    def create(cls, choice, dtype, *, deterministic):
        kernel = cls()
        kernel.name, kernel.given = "chosen", (choice, str(dtype), deterministic)
        return kernel

    def split(self, work):
        self.split_for.add(self.given)
        return super().split(work)

    @classmethod
    def missing(cls):
        return "no such device"


def cases():
    """Two columns that do nothing, on one rank."""
    columns = tuple(BenchColumn(name, 1, lambda context: lambda: context.rank) for name in ("idle", "again"))
    return [BenchCase("nothing", 1, {}, columns, (Ratio("idle", "again"),))]


SUITE = BenchSuite(cases, lambda records: ("all is idle", True))
'''
USE = """
import pytest, torch, ringattn as ra
q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
found = ra.virtual_attention(q, k, v, "Recent() | Sinks(2)", ranks=4, schedule="star")
same = ra.attention(q, k, v, ra.Window(1) | ra.Sinks(2))
assert (found - same).abs().max() < 1e-12
plan = ra.make_plan("Recent()", tokens=40, ranks=4, schedule="star")
assert plan.schedule == "star" and ra.Plan.from_json(plan.to_json()) == plan and ra.simulate(plan, "cpu").seconds > 0
with pytest.raises(ra.InvalidInput, match="did you mean 'star'"):
    ra.make_plan("Recent()", tokens=40, ranks=4, schedule="stars")
"""
USE_KERNEL = """
import sys, pytest, torch, ringattn as ra
from ringattn.kernels import available, get_kernel
q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
def run(**options):
    out = ra.virtual_attention(q, k, v, ra.Causal(), ranks=4, **options)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))
plain, automatic = run(kernel="reference"), run()
assert "outside" not in sys.modules
found = run(kernel="counting")
import outside
calls = outside.Counting.calls
assert calls >= 20 and all(torch.equal(a, b) for a, b in zip(found, plain))
run()
assert outside.Counting.calls == calls, "auto chooses kernels of ringattn only"
expected = ra.attention(q, k, v, ra.Causal(), kernel="reference")
assert torch.equal(ra.nn.RingAttention(ra.Causal(), kernel="counting")(q, k, v), expected)
assert outside.Counting.calls > calls
for wrong, words in (
    ("countin", "did you mean 'counting'"),
    ("chosen:fst", "did you mean 'chosen:fast'"),
    ("counting:fast", "unknown kernel 'counting:fast'"),
):
    with pytest.raises(ra.InvalidInput, match=words):
        run(kernel=wrong)
half = torch.randn(1, 2, 40, 8)
with pytest.raises(ra.Unsupported, match="computes float64"):
    ra.attention(half, half, half, ra.Causal(), kernel="counting")
chosen = get_kernel("chosen:exact", q, k, v, deterministic=True)
assert type(chosen) is outside.Chosen and chosen.given == ("exact", "torch.float64", True)
assert get_kernel("chosen", q, k, v).given == (None, "torch.float64", False)
for deterministic in (False, True):
    run(kernel="chosen:fast", deterministic=deterministic)
assert {given[2] for given in outside.Chosen.split_for} == {False, True}, "each is asked, and no other's calls are made"
states = available()
assert states["counting"] == "ok" and states["chosen:fast"] == states["chosen"] == "no such device"
assert "the package outside offers kernels 'broken', which cannot be imported" in states["broken"]
"""


def offered(folder: Path, points: dict[str, dict[str, str]], parts: str = PARTS) -> str:
    """A folder in which a package is installed that offers these attributes of its module `outside`, by kind and name.

    An attribute of another module is "module:attribute".
    """
    info = folder / "outside-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "outside.py").write_text(parts)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    lines = []
    for kind, names in points.items():
        lines += [
            f"[ringattn.{kind}]",
            *(f"{name} = {at if ':' in at else f'outside:{at}'}" for name, at in names.items()),
        ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return str(folder)


def run_code(code: str, folder: Path, site: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    (script := folder / "script.py").write_text(code)
    return ringattn(cwd=folder, script=str(script), site=site, status=status)


@pytest.mark.parametrize(
    ("points", "use"),
    [
        ({"patterns": {"Recent": "Recent"}, "schedules": {"star": "Star"}}, USE),
        ({"kernels": {"counting": "Counting", "chosen": "Chosen", "broken": "Missing"}}, USE_KERNEL),
    ],
    ids=["pattern and schedule", "kernel"],
)
def test_an_installed_package_adds_parts(tmp_path: Path, points: dict[str, dict[str, str]], use: str) -> None:
    run_code(use, tmp_path, offered(tmp_path / "site", points))


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ("plan -m schedule=star,ring pattern=Recent()", 0, "schedule        star"),
        ("simulate -m schedule=star,ring", 0, "2 points [modelled], 0 refused"),
        ("plan schedule=stra", 2, "did you mean 'star'? expected one of allgather, auto, direct"),
        ("run kernel=counting transport=virtual dtype=float64 repeat=1", 0, "on 4 virtual ranks"),
        ("run kernel=counting transport=virtual", 2, "kernel counting computes float64, got"),
    ],
)
def test_the_command_line_takes_names_of_an_installed_package(
    tmp_path: Path, words: str, status: int, shown: str
) -> None:
    points = {"patterns": {"Recent": "Recent"}, "schedules": {"star": "Star"}, "kernels": {"counting": "Counting"}}
    site = offered(tmp_path / "site", points)
    done = ringattn(*words.split(), "ranks=4", "tokens=40", cwd=tmp_path, site=site, status=status)
    assert shown in done.stdout + done.stderr


@pytest.mark.multi
def test_an_installed_package_adds_a_bench_suite(tmp_path: Path) -> None:
    """On the command line, where each rank finds the suite in a process of its own."""
    site = offered(tmp_path / "site", {"bench_suites": {"idle": "SUITE"}})
    path = os.pathsep.join([site, str(Path(__file__).resolve().parents[1])])
    command = [sys.executable, "-m", "ringattn", "report", "suite=idle", "repeat=2", "output.path=out"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, timeout=120, check=True)
    (path,) = (tmp_path / "out").glob("idle_*.jsonl")
    _, record = map(json.loads, path.read_text().splitlines())
    assert [len(column["seconds"]) for column in record["columns"].values()] == [2, 2]
    assert "All is idle" in path.with_suffix(".html").read_text()
    told = ringattn("report", "--help", cwd=tmp_path, site=site)
    assert "suites: auto, " in told.stdout and ", idle, latents, long" in told.stdout, told.stderr


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("Causal", "Recent", "the package outside offers patterns 'Causal', a name that is in use"),
        ("Recent", "Missing", "the package outside offers patterns 'Recent', which cannot be imported"),
        ("Recent", "nowhere:Recent", "No module named 'nowhere'"),
    ],
)
def test_packages_that_cannot_be_used_are_named(tmp_path: Path, name: str, at: str, words: str) -> None:
    site = offered(tmp_path / "site", {"patterns": {name: at}})
    done = run_code("import ringattn as ra; ra.parse_pattern('Recent()')", tmp_path, site, status=1)
    assert words in done.stderr.splitlines()[-1]


TRANSPORT = '''
import os
import time
from pathlib import Path

import torch

from ringattn.transport.base import Counters


class Folder:
    """Messages are files of a folder that all ranks see."""

    def __init__(self, *, timeout):
        self.folder, self.timeout = Path(os.environ["FOLDER"]), timeout
        self.rank, self.size = int(os.environ["FOLDER_RANK"]), int(os.environ["FOLDER_SIZE"])
        self.counters, self.events, self.posted = Counters(), 0, {}

    def check(self, device):
        assert device.type == "cpu"

    def post(self, post):
        self.counters.add(post)
        for message in post.sends:
            self.write(f"{self.rank}.{message.peer}.{message.tag}", message.data.numpy().tobytes())
        return post.recvs

    def wait(self, ticket):
        for message in ticket:
            raw = self.read(f"{message.peer}.{self.rank}.{message.tag}")
            message.data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def defers(self, check):
        return False

    def gather(self, record, stage):
        number, self.events = self.events, self.events + 1
        for peer in range(self.size):
            self.write(f"record.{number}.{self.rank}.{peer}", record)
        return [self.read(f"record.{number}.{peer}.{self.rank}") for peer in range(self.size)]

    def write(self, name, data):
        while (self.folder / name).exists():  # the message before it under this tag
            time.sleep(0.001)
        (self.folder / f"part.{name}").write_bytes(data)
        (self.folder / f"part.{name}").rename(self.folder / name)

    def read(self, name):
        deadline = time.monotonic() + self.timeout
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.001)
        data = (self.folder / name).read_bytes()
        (self.folder / name).unlink()
        return data
'''


def test_an_installed_package_adds_a_transport(tmp_path: Path) -> None:
    """`ringattn run` compares its output with an oracle, and the bytes of the transport with the plan's."""
    site = offered(tmp_path / "site", {"transports": {"folder": "Folder"}}, TRANSPORT)
    (tmp_path / "messages").mkdir()
    words = "run transport.spec=folder ranks=2 input=random tokens=256 repeat=1 timeout=100 threads=1"
    variables = {"FOLDER": str(tmp_path / "messages"), "FOLDER_SIZE": "2"}

    def run(rank: int) -> str:
        return ringattn(words, cwd=tmp_path, site=site, FOLDER_RANK=str(rank), **variables).stdout

    with ThreadPoolExecutor(2) as threads:
        printed, _ = threads.map(run, range(2))
    assert "2 folder ranks" in printed and "as planned" in printed
    assert not list((tmp_path / "messages").iterdir()), "every message was received"


def test_text_can_spell_every_pattern_of_the_package() -> None:
    """A new file in pattern/ needs its line in PATTERNS. Operators, bases and views of plans have no name."""
    unnamed = {"And", "Or", "Mix", "HeadSlice", "RowByRow", "Slotted"}
    for module in pkgutil.iter_modules(patterns.__path__):
        for kind in vars(importlib.import_module(f"ringattn.pattern.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, Pattern) and not inspect.isabstract(kind):
                assert kind.__name__ in unnamed or kind in PATTERNS.values()


def test_an_installation_that_is_older_than_the_source_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; from ringattn.registry import Registry; Registry.installed = {}\n"
        "from ringattn.cli.main import main\n"
        "for words in sys.argv[1:]:\n"
        "    sys.argv = ['ringattn', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 2\n"
    )
    calls = ("advise", "simulate -m ranks=2,4", "score")
    done = subprocess.run(
        [sys.executable, "-c", code, *calls], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    told = done.stderr.splitlines()
    assert len(told) == len(calls), done.stderr
    assert all("was installed before its source had them; install it again" in line for line in told), done.stderr
