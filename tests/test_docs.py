"""README and the pages of docs/: links exist, commands parse, code runs."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import Inside, ringattn
from imported import import_file
from safetensors.torch import save_file

from ringattn.cli.config.overrides import as_study, prepare
from ringattn.cli.main import VERBS
from ringattn.lab.bench.case import get_summary
from ringattn.lab.bench.report import read_report

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
#: What starts a sample that needs several ranks, or another file, and is only compiled.
SEVERAL_RANKS = ("# torchrun", "# mpirun")
OF_OTHER_FILES = ("# app.py",)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def with_samples(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target and "_generated/" not in target:  # scripts/docs draws these, and fails without them
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", with_samples("python"), ids=name_of)
def test_python_samples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a page run one after another, as a reader would run them, and print what the page says."""
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, object] = {}
    for sample, shown in re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), re.DOTALL):
        code = compile(sample, str(page), "exec")
        if sample.startswith((*SEVERAL_RANKS, *OF_OTHER_FILES)):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        assert not shown or lines == shown.splitlines()


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=name_of)
def test_notebooks_have_no_outputs(notebook: Path) -> None:
    """The build of the pages runs them, and fails where a cell does."""
    cells = json.loads(notebook.read_text())["cells"]
    assert any(cell["cell_type"] == "code" for cell in cells)
    assert not any(cell.get("outputs") for cell in cells)
    assert "nb_execution_raise_on_error = True" in (ROOT / "docs/conf.py").read_text()


def test_the_table_of_support_names_tests_that_exist() -> None:
    named = re.findall(r"\]\(\.\./(tests/\S+\.py)#(\w+)\)", (ROOT / "docs" / "support.md").read_text())
    assert len(named) > 80
    assert not [(file, test) for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]


def commands_of(page: Path) -> list[str]:
    """The lines of the page's shell samples, and commands within its text."""
    joined = [block.replace("\\\n", "") for block in blocks(page, "bash")]
    lines = [" ".join(line.split("#")[0].split()) for block in joined for line in block.splitlines()]
    return lines + re.findall(r"`((?:ringattn|scripts/)[^`]*)`", page.read_text())


@pytest.mark.parametrize("page", with_samples("bash"), ids=name_of)
def test_commands_parse(page: Path) -> None:
    for command in commands_of(page):
        words = shlex.split(command)
        if words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()
            words = ["ringattn", "run", *words[1:]] if words[0] == "scripts/run" else []
        if len(words) > 1 and words[0] == "ringattn" and not words[1].startswith(("-", "<")):
            overrides = as_study("study", words[2:]) if words[1] == "study" else words[2:]
            prepare(words[1], [word for word in overrides if "=" in word])


#: Runs a program as an installation does that `build_editable` made: by the .pth file of its wheel.
INSTALLED = """
import runpy, site, sys
known, folder, sys.argv = [*sys.path], sys.argv[1], sys.argv[2:]
site.addsitedir(folder)
sys.path[:] = [sys.path[0], *(x for x in sys.path if x not in known), *known[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}


@pytest.mark.parametrize("way", ["build_editable", "build_wheel"])
def test_another_hydra_application_has_our_groups_if_it_asks(way: str, tmp_path: Path) -> None:
    """The sample of the page, beside an installation of each kind; a group of the application goes before ours.

    Without the line that asks, no option of ours is accepted.
    """
    (sample,) = [block for block in blocks(ROOT / "docs/command_line.md", "python") if block.startswith("# app.py")]
    (settings,) = blocks(ROOT / "docs/command_line.md", "yaml")
    build = f"import hatchling.build as b; print(b.{way}({str(tmp_path)!r}))"
    pytest.importorskip("hatchling")
    done = subprocess.run([sys.executable, "-c", build], cwd=ROOT, **CAPTURED)
    assert done.returncode == 0, done.stderr
    zipfile.ZipFile(tmp_path / done.stdout.strip()).extractall(tmp_path / "site")
    (tmp_path / "app.py").write_text(sample)
    (tmp_path / "app.yaml").write_text(settings)
    (tmp_path / "boot.py").write_text(INSTALLED)
    (tmp_path / "pattern").mkdir()
    (tmp_path / "pattern" / "causal.yaml").write_text("spec: Full()\n")
    (tmp_path / "other.py").write_text(
        "import hydra\n@hydra.main(version_base='1.3', config_path='.')\ndef main(config): print(config)\nmain()\n"
    )

    def run(*overrides: str, app: str = "app.py", status: int = 0) -> str:
        words = ["boot.py", str(tmp_path / "site"), app, *overrides, "hydra.run.dir=."]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, **CAPTURED)
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout.strip()

    assert run("pattern.left=7", "machine=l20_pcie") == "(Causal() & Window(left=7, right=0)) l20_pcie"
    if way == "build_wheel":  # what is found is the same
        return
    assert run() == "(Causal() & Window(left=4095, right=0)) h100_nvlink_ib"
    assert run("pattern=causal").startswith("Full()")
    assert run("+pattern=causal", app="other.py") == "{'pattern': {'spec': 'Full()'}}"
    assert "Could not find 'pattern/window'" in run("+pattern=window", app="other.py", status=1)
    assert "Could not override 'schedule'" in run("schedule=ring", app="other.py", status=1)


#: Takes seconds of one core at most; all others run where RINGATTN_EVERY_COMMAND is set, which takes an hour.
QUICK = re.compile(
    r"ringattn (plan(?! -m experiment)|doctor|run .*--|simulate ranks=256|estimate|study stragglers|verify$)"
)
#: What the samples read; `calibrate` writes machine.yaml for those after it.
STORED = {"outputs/bench/standard_1.jsonl": "standard", "old.jsonl": "standard", "new.jsonl": "standard"}
COMMANDS = dict.fromkeys(
    command
    for page in PAGES
    for command in commands_of(page)
    if re.match(r"(ringattn \S+ [^.]|scripts/(run|train))", command)
    and not re.search(r"NAME|VERB|\.\.\.|suite=gpu|offload=disk$", command)
)


@pytest.mark.timeout(3600 if "RINGATTN_EVERY_COMMAND" in os.environ else 120)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path_factory: pytest.TempPathFactory, inside: Inside) -> None:
    if not QUICK.match(command) and "RINGATTN_EVERY_COMMAND" not in os.environ:
        pytest.skip("takes long; RINGATTN_EVERY_COMMAND=1 runs it")
    folder = tmp_path_factory.getbasetemp() / "commands"
    (folder / "outputs/bench").mkdir(parents=True, exist_ok=True)
    for name, suite in STORED.items():
        (folder / name).write_bytes(next(ROOT.glob(f"benchmarks/{suite}_*.jsonl")).read_bytes())
    tensors = {name: torch.randn(1, 2, 4096, 16) for name in ("q", "k", "v")}
    save_file(tensors, folder / "qkv.safetensors")
    program, *words = shlex.split(command)
    if program == "scripts/train":  # of a script, what it does after its set-up
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        launch += [str(ROOT / "examples/long_context/train.py"), *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(launch, cwd=folder, env=env, capture_output=True, text=True, check=False)
    elif program == "ringattn" and words[0] in ("plan", "simulate", "verify", "estimate", "study", "doctor"):
        done = inside(*words, cwd=folder)
    else:
        verb = ("run", "layout=zigzag") if program == "scripts/run" else ()
        done = ringattn(*verb, *words, cwd=folder, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_samples() -> None:
    """The tests above look at something: samples are found by their fences."""
    assert len(with_samples("python")) >= 5
    assert len(with_samples("bash")) >= 3


@pytest.mark.parametrize(("page", "count"), [("command_line", 2), ("cluster", 3)])
def test_pictures_and_listings_are_what_the_commands_print(
    page: str, count: int, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the command's output, in its order; "..." stands for lines that the page leaves out."""
    monkeypatch.setenv("COLUMNS", "96")
    shown = blocks(ROOT / f"docs/{page}.md", "console")
    assert len(shown) == count
    for block in shown:
        command, *lines = block.strip().splitlines()
        words = shlex.split(command.removeprefix("$ ringattn "))
        printed = iter([line.rstrip() for line in inside(*words, cwd=ROOT).stdout.splitlines()])
        for before, line in pairwise(["", *lines]):
            if line != "...":
                assert line in printed if before == "..." else line == next(printed)


def test_the_change_from_one_device_to_many_in_the_readme() -> None:
    """Its six lines, on the ranks that there are in this process, give what the call that they replace gives."""
    (sample,) = [block for block in blocks(ROOT / "README.md", "python") if block.startswith(SEVERAL_RANKS)]
    (line,) = re.findall(r"# before: (out = .*)\n", sample)
    assert len([line for line in sample.splitlines() if line and not line.startswith("#")]) <= 6
    torch.manual_seed(0)
    names: dict[str, Any] = dict(zip("qkv", torch.randn(3, 1, 2, 40, 8), strict=True))
    names |= {"F": torch.nn.functional, "dist": dist}
    known = eval(line.removeprefix("out = "), names)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(sample, names)
    finally:
        dist.destroy_process_group()
    assert torch.allclose(names["out"], known, atol=1e-6)


def test_the_figures_of_the_readme_are_those_of_its_plan_and_of_the_newest_stored_run() -> None:
    for path, draw in import_file(ROOT / "docs/figures.py").STORED.items():
        drawn = draw()
        assert path.read_text() == drawn, "draw it again: python docs/figures.py"
        assert "prefers-color-scheme:dark" in drawn


def test_the_readme_is_short() -> None:
    """Its prose, without samples, figures and addresses; lines fit any window, but for tables."""
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"```.*?```|!\[[^]]*\]\([^)]*\)|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL)
    assert len(prose.split()) <= 700
    assert not [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paragraphs_and_code_are_short(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE), "of a merge"
    if page.name != "CHANGELOG.md":  # its entries are lists
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        items = [item for part in re.split(r"\n\s*\n", prose) for item in re.split(r"\n(?=- |\d+\. )", part)]
        assert not [item for item in items if item[:1] != "|" and len(item.split()) > 120]
    wide = [line for block in re.findall(r"```.*?```", text, re.DOTALL) for line in block.splitlines()]
    assert not [line for line in wide if len(line) > 100]


def newest(suite: str) -> dict[str, dict[str, str]]:
    """The ratios of the newest stored run of a suite, by case and name, as pages print them."""
    runs = [path.read_text().splitlines() for path in ROOT.glob(f"benchmarks/{suite}_*.jsonl")]
    last = max(runs, key=lambda lines: json.loads(lines[0])["machine"]["date"])
    cases = list(map(json.loads, last[1:]))
    return {case["case"]: {row["ratio"]: f"{row['median']:.2f}" for row in case.get("ratios", [])} for case in cases}


def test_headlines_are_those_of_the_newest_stored_runs() -> None:
    readme, measured = " ".join((ROOT / "README.md").read_text().split()), (ROOT / "docs/measured.md").read_text()
    schedules, peers, patterns, hosts = (newest(name) for name in ("schedules", "peers", "patterns", "hosts"))
    cases = ["window ring", "window direct", "window_step ring", "documents ring", "documents direct"]
    messages = [schedules[case][f"allgather_messages / {name}_messages"] for case, name in map(str.split, cases)]
    assert f"| {' | '.join(messages)} |" in measured
    for mask, words in (
        ("causal", "Causal: {} times at 100 Mbit/s, {} at 1,600."),
        ("window", "Window of 256: {} and {}."),
        ("documents", "Packed documents: {} and {}."),
    ):
        ends = (f"{float(hosts[f'{mask}_{rate}']['allgather / ring']):.2g}" for rate in (100, 1600))
        assert words.format(*ends) in readme
    for rate in (100, 400, 1600):
        times = [hosts[f"{mask}_{rate}"]["allgather / ring"] for mask in ("causal", "window", "documents")]
        assert f"| {rate:,} | {' | '.join(times)} |" in measured
    for case, ranks in (("double_ring_4", 2), ("double_ring_4_step", 2), ("double_ring_8", 4)):
        assert f"{schedules[case][f'ring / double_ring({ranks})']} times" in measured
    assert f"documents {patterns['documents_16']['dense / forward x 0.0625']}," in measured
    assert f"window of 256 {patterns['window_256']['dense / forward x 0.03076']}." in measured

    packed, page = schedules["packed"]["contiguous / balanced"], (ROOT / "docs/packed_documents.md").read_text()
    assert f"[measured](measured.md#messages) {packed} times as fast" in page and f"take {packed} times" in measured

    def beside(name: str, mask: str, way: str) -> str:
        return peers[f"{mask}_{way}"].get(f"{name} / ringattn", "-")

    labels = {
        "PyTorch's context-parallel template, all-gather": "template",
        "the same, all-to-all": "template_a2a",
        "ring-flash-attn, on a CPU stand-in for its kernel": "ring-flash-attn",
        "ring-attention-pytorch": "ring-attention-pytorch",
        "torchscale's dilated attention": "torchscale",
        "`scaled_dot_product_attention`": "sdpa",
        "compiled FlexAttention": "FlexAttention",
    }
    for label, name in labels.items():
        masks = ("dense", "causal", "window", "documents", "dilated")
        cells = [f"{beside(name, mask, 'forward')} / {beside(name, mask, 'backward')}" for mask in masks]
        assert f"| {label} | {' | '.join(cells)} |".replace("- / -", "-") in measured
    templates = [beside(name, mask, "forward") for name in ("template", "template_a2a") for mask in ("dense", "causal")]
    sdpa = [beside("sdpa", mask, "forward") for mask in ("dense", "causal")]
    flex = (beside("FlexAttention", mask, "forward") for mask in ("window", "documents"))
    for words in (
        "two ranks: {} times (window) and {} times (documents) as fast as compiled FlexAttention".format(*flex),
        f"masks {min(templates)} to {max(templates)} times as fast as PyTorch's context parallelism, and "
        f"{min(sdpa)} to {max(sdpa)} times as fast as `scaled_dot_product_attention`",
    ):
        assert words in readme


def test_missed_and_lowered_targets_are_those_of_the_reports() -> None:
    told = " ".join((ROOT / "docs/measured.md").read_text().split("the target was lowered")[1].split())
    lowered, missed = told.split("Scripts of a few")[0].split("Still missed:")
    seen = 0
    for report in map(read_report, ROOT.glob("benchmarks/*.jsonl")):
        rows = re.findall(rf"\| {report.record['suite']}: [^|]*\| ([^|]*)\| ([^|]*)\|", lowered)
        for case in report.record["cases"]:
            summary = [{"median": one.get("peer / ringattn"), **one} for one in get_summary(case)]
            for one in (*case.get("ratios", ()), *summary):
                if "was" in one:
                    seen += 1
                    assert any(is_within(one["median"], cell) and f"{one['target']:g}" in of for cell, of in rows), one
                elif one.get("met") is False:
                    assert f"{one['median']:.2f}" in missed, one
    assert seen > 10


def is_within(value: float, cell: str) -> bool:
    """Whether a value is in a cell such as "0.59, 0.64" or "0.38 to 0.60"."""
    numbers = sorted(map(float, re.findall(r"[\d.]+", cell)))
    return numbers[0] <= round(value, 2) <= numbers[-1]


def test_counts_of_classes_are_those_of_the_table_and_verbs_those_of_the_command_line() -> None:
    with (ROOT / "docs/support_models.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    plain = Counter(answer for name, answer, _ in rows if "(" not in name.removesuffix(".get_decoder()"))
    sets = Counter(answer for name, answer, _ in rows) - plain
    readme, models, changes = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/models.md", "CHANGELOG.md")
    )
    assert f"[{plain['exact']} of {plain.total():,} transformers classes]" in readme
    assert (
        f"Of {plain.total():,} classes of transformers 5.24, {plain['refused']} are refused by name, "
        f"{plain['exact']} are exact, {plain['not set up']} could not be set up, and none is wrong."
    ) in models
    assert f"({sets['exact']:,} sets are exact, {sets['refused']} refused)" in models
    (verbs,) = re.findall(r"\*\*Command line\*\*: `([a-z ]+)`", changes)
    assert sorted(verbs.split()) == sorted(VERBS)


def test_errors_on_published_measurements_are_those_of_their_page() -> None:
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/simulation.md", "benchmarks/published.md")]
    told = [
        re.search(r"^\| families that set nothing \| (\d+) \|[| ]*([\d.]+) / ([\d.]+) %", page, re.M)
        for page in pages[1:]
    ]
    assert told[0] and told[1] and told[0].groups() == told[1].groups()
    count, half, most = told[0].groups()
    readme = " ".join(pages[0].split())
    assert f"{count} published attention times are predicted" in readme
    assert f"a median error of {half} % and a 90th percentile of {most} %" in readme
