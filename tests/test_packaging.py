"""Wheel and sdist are whole and work from anywhere, and what the Dockerfile and the scripts name exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import ringattn
from ringattn import integrations
from ringattn.cli.doctor import EXTRAS
from ringattn.integrations import NEWEST, check_release

ROOT = Path(__file__).resolve().parents[1]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = TOOLS["project"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_the_sdist_holds_every_file_of_the_repository(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30)
    assert set(filter(lambda name: (ROOT / name).exists(), listed.stdout.split("\0"))) - {""} <= names


def test_the_wheel_holds_code_types_data_and_configs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ringattn/py.typed", "ringattn/conf/run.yaml", "ringattn/conf/pattern/causal.yaml"} <= names
    package = {path for path in (ROOT / "ringattn").rglob("*.*") if "__pycache__" not in path.parts}
    assert {path.suffix for path in package} >= {".py", ".j2", ".yaml", ".csv"}
    assert {str(path.relative_to(ROOT)) for path in package} <= names
    assert {f"ringattn/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")} <= names
    assert not [name for name in names if name.startswith(("tests", "conf/"))]
    assert ringattn.__version__ in wheel.name


def test_an_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, cwd = tmp_path / "site", tmp_path / "elsewhere"
    cwd.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=120)
    env = {**os.environ, "PYTHONPATH": str(site)}
    script = site / "bin" / "ringattn"
    assert script.exists(), "the console script"
    done = subprocess.run(
        [sys.executable, str(script), "plan", "ranks=2", "tokens=64", "pattern=Causal() & Window(7)"],
        capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(Causal() & Window(left=7, right=0)) over 64 tokens" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "from ringattn.cli.config import defaults as c; print(c.__file__, c.conf_dir())"],
        capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    assert all(path.startswith(str(site)) for path in where)


def test_each_promised_python_and_both_ends_of_torch_have_a_row_of_ci() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    promised = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    lowest = promised[0]
    assert [row["python"] for row in rows if not row["torch"]] == promised
    assert PROJECT["requires-python"] == f">={lowest}" and TOOLS["tool"]["mypy"]["python_version"] == lowest
    assert f"sys.version_info < (3, {lowest.removeprefix('3.')})" in (ROOT / "scripts" / "setup").read_text()
    (torch,) = [each.removeprefix("torch>=") for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert {row["torch"] for row in rows} == {"", f"torch=={torch}.0", "torch"}


WINDOWS = """
import os, signal, sys
import hydra.main, rich.console, torch.distributed  # these are as on this system
for module, names in ((signal, ("pthread_sigmask", "SIG_BLOCK", "SIG_SETMASK", "SIGKILL", "SIGHUP", "SIGPIPE")),
                      (os, ("fork", "sysconf", "killpg"))):
    for name in names:
        delattr(module, name)
sys.modules.update(dict.fromkeys(("resource", "fcntl", "pwd", "termios")))
sys.platform = "win32"
from ringattn.cli.main import main
for words in sys.argv[1:]:
    sys.argv, status = ["ringattn", *words.split()], 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    for stream in (sys.stdout, sys.stderr):
        print(f"== {status}", file=stream, flush=True)
"""
CALLS = {
    "plan ranks=2 tokens=64": "Causal() over 64 tokens",
    "simulate ranks=8 tokens=64k machine=h100_nvlink_ib": "Causal() over 65,536 tokens",
    "run ranks=2": "ringattn run: not on Windows",
    "report standard": "ringattn report: not on Windows",
    "verify": "ringattn verify: not on Windows",
}


def test_what_windows_lacks_is_said_in_a_line(tmp_path: Path) -> None:
    """Emulated by taking away what Python does not have there. A call after the other, as imports take long."""
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS, *CALLS], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True,
    )  # fmt: skip
    printed, told = (re.findall(r"((?:.*\n)*?)== (\d)\n", text) for text in (done.stdout, done.stderr))
    for answer, (out, status), (err, _) in zip(CALLS.values(), printed, told, strict=True):
        refused = "not on" in answer
        assert answer in (err if refused else out), done
        assert status == ("2" if refused else "0") and err.count("\n") == refused


def test_dockerfile_names_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages == ["cpu", "cuda"]
    for stage in text.split("\nFROM ")[1:] if not text.startswith("FROM") else text.split("FROM ")[1:]:
        assert "--uid 10001 ringattn" in stage and "USER 10001" in stage and 'ENTRYPOINT ["ringattn"]' in stage
    assert {"gcc", "python3-dev"} < {*stage.split()}, "what Triton needs, in the last stage"
    extras = set(re.findall(r"\.\[(\w+)\]", text))
    assert extras <= set(PROJECT["optional-dependencies"])


def test_scripts_are_executable_and_parse() -> None:
    scripts = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    assert {p.name for p in scripts} == {"run", "test", "check", "docs", "setup", "gpu", "train", "lowest", "kernels"}
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
        assert "set -euo pipefail" in script.read_text()


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_the_gpu_script_says_what_failed_and_goes_on(tmp_path: Path) -> None:
    """With stand-ins for setup, python and ringattn, which note how they are called."""
    write_script(tmp_path / "scripts" / "gpu", (ROOT / "scripts" / "gpu").read_text())
    write_script(tmp_path / "scripts" / "setup", 'echo "setup $* torch=${RINGATTN_TORCH:-}"')
    write_script(tmp_path / ".venv" / "bin" / "ringattn", 'echo "bench on ${RINGATTN_TEST_DEVICE}: $*"')
    for failing, status in (("test_kernels", 1), ("nothing", 0)):
        write_script(tmp_path / ".venv" / "bin" / "python", f'echo "$*"; [[ "$*" != *{failing}* ]] || exit 3')
        done = subprocess.run(
            [str(tmp_path / "scripts" / "gpu"), "repeat=7"], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == status, done.stderr
        summary = done.stdout.split("summary:\n")[1].splitlines()
        assert ("  FAILED  kernels, status 3" in summary) == bool(status) and len(summary) == 9
        fine = sum("  ok " in line or "skipped compute" in line for line in summary)
        assert fine == 9 - status
        assert "setup dev torch=\n" in done.stdout and "bench on cuda: report suite=gpu repeat=7" in done.stdout
    write_script(tmp_path / ".venv" / "bin" / "python", "exit 1")
    done = subprocess.run([str(tmp_path / "scripts" / "gpu")], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "== " not in done.stdout, "nothing is tried without a device"
    assert done.stderr.startswith("scripts/gpu: torch sees no CUDA device; ") and done.stderr.count("\n") == 1
    shutil.rmtree(tmp_path / ".venv")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    write_script(tmp_path / "nvidia-smi", "exit 9")
    done = subprocess.run(
        [str(tmp_path / "scripts" / "gpu")], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1 and not done.stdout, "nothing is installed without a card"
    assert done.stderr.startswith("scripts/gpu: nvidia-smi shows no card") and done.stderr.count("\n") == 1
    named = re.findall(r"(tests/\S+\.py)", (ROOT / "scripts" / "gpu").read_text())
    assert named and all((ROOT / name).exists() for name in named)


def test_setup_takes_the_torch_that_is_named(tmp_path: Path) -> None:
    """By words of pip or as the interpreter has it; what .venv was made with stays."""
    for name in ("constraints.txt", "constraints-torch.txt", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    write_script(tmp_path / "scripts" / "setup", (ROOT / "scripts" / "setup").read_text())
    # `python -m venv` makes a python that notes its calls and has torch 2.11.0.
    python = tmp_path / "bin" / "python"
    write_script(
        python,
        """echo "$*" >> calls
case "$*" in
    *version_info*) ;;
    -c*) echo torch==2.11.0 ;;
    *pip*) echo "WARNING: Location is ignored" >&2 ;;
    *venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac""",
    )

    def calls(*extras: str, **environment: str) -> list[str]:
        (tmp_path / "calls").write_text("")
        clean = {key: value for key, value in os.environ.items() if key != "RINGATTN_TORCH"}
        done = subprocess.run(
            [str(tmp_path / "scripts" / "setup"), *extras], env={**clean, "PYTHON": str(python), **environment},
            cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
        return (tmp_path / "calls").read_text().splitlines()

    first = calls(RINGATTN_TORCH="system")
    assert "-m venv --system-site-packages .venv" in first
    (installed,) = [line for line in first if "pip install" in line]
    assert installed.endswith("-c constraints.txt torch==2.11.0 -e .")
    assert calls() == [], "nothing has changed"
    assert calls("dev,docs")[-1].endswith("-e .[dev,docs]") and calls("docs") == calls("dev") == []
    assert calls("dev,plot")[-1].endswith("-e .[dev,plot]")
    for words in ("torch==2.12.0", "torch==2.12.0 --pre"):
        assert [line for line in calls(RINGATTN_TORCH=words) if line.endswith(f"-c constraints.txt {words}")]
    (tmp_path / ".venv" / ".torch").unlink()
    pinned = [line for line in calls() if "pip install" in line]
    assert pinned[0].endswith("-c constraints-torch.txt torch==2.13.0") and "-c constraints-torch.txt" in pinned[1]


def wanted_by(extra: str) -> list[str]:
    """The requirements of an extra, and of the extras that it names."""
    found: list[str] = []
    for spec in PROJECT["optional-dependencies"][extra]:
        inner = re.fullmatch(r"ringattn\[(.+)\]", spec)
        found += [spec] if inner is None else [each for name in inner[1].split(",") for each in wanted_by(name)]
    return found


def test_libraries_of_models_are_promised_up_to_the_pinned_minor_and_tested_from_the_lowest_release() -> None:
    """Each bound is written once; the script and a row of the weekly workflow take the lowest ones."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    script, text = (ROOT / "scripts/lowest").read_text(), (ROOT / "pyproject.toml").read_text()
    libraries = re.findall(r"\w+", script.split("libraries='")[1].split("'")[0])
    assert libraries == ["accelerate", "diffusers", "peft", "transformers", "trl"]
    for name in libraries:
        major, minor, _ = pins[name].split(".")
        ((lowest, end),) = re.findall(rf'"{name}>=([\d.]+),<([\d.]+)"', text)
        assert end == f"{major}.{int(minor) + 1}" and NEWEST[name] == f"{major}.{minor}", name
        assert tuple(map(int, lowest.split("."))) <= tuple(map(int, pins[name].split("."))), name
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "schedule:" in workflow and "run: scripts/lowest" in workflow
    assert f"pip install --upgrade {' '.join(libraries)}" in workflow


def test_constraints_pin_every_dependency_exactly() -> None:
    """And what torch pins itself is apart, for those who take another torch."""
    pins, of_torch = (
        dict(line.lower().replace("_", "-").split("==") for line in (ROOT / name).read_text().splitlines())
        for name in ("constraints.txt", "constraints-torch.txt")
    )
    assert of_torch["torch"] == "2.13.0" and "triton" in of_torch and not pins.keys() & of_torch.keys()
    wanted = [*PROJECT["dependencies"], *wanted_by("dev")]
    names = {re.split(r"[<>=!\[ ]", spec)[0].lower().replace("_", "-") for spec in wanted}
    assert names <= {*pins, *of_torch}


def test_a_release_newer_than_the_tested_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_release(*NEWEST)
    monkeypatch.setattr(integrations, "version", lambda name: "5.25.0.dev0")
    adapter = pytest.importorskip("ringattn.integrations.transformers")
    with pytest.raises(ringattn.errors.Unsupported, match=r"transformers 5\.25\.0\.dev0 is newer .* 'transformers==5"):
        adapter.parallelize(None, layout="zigzag")


def test_developers_get_what_the_mpi_tests_need() -> None:
    assert set(wanted_by("mpi")) <= set(wanted_by("dev"))


def test_doctor_names_the_extras_that_there_are() -> None:
    """An extra that nothing uses is a promise: `hf` was one."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) - {"dev"}
    named = {name for _, command in EXTRAS.values() for name in re.findall(r"ringattn\[(\w+)\]", command)}
    pages = "".join(page.read_text() for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")))
    assert extras == named == set(re.findall(r"ringattn\[(\w+)\]", pages))
