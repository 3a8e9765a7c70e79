"""The wheel works from anywhere, and what the Dockerfile and the scripts name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

import ringattn
from ringattn.cli.doctor import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text()) if sys.version_info >= (3, 11) else {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_holds_code_types_and_configs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"ringattn/py.typed", "ringattn/conf/run.yaml", "ringattn/conf/pattern/causal.yaml"} <= names
    assert {f"ringattn/{p.relative_to(ROOT / 'ringattn')}" for p in (ROOT / "ringattn").rglob("*.py")} <= names
    templates = [p.relative_to(ROOT) for p in (ROOT / "ringattn").rglob("*.j2")]
    assert templates and {str(path) for path in templates} <= names
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
        [sys.executable, "-c", "import ringattn, ringattn.config.schema as c; print(ringattn.__file__, c.conf_dir())"],
        capture_output=True, text=True, cwd=cwd, env=env, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    assert all(path.startswith(str(site)) for path in where)


def test_dockerfile_names_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert sources and all((ROOT / source).exists() for source in sources)
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
    assert stages == ["cpu", "cuda"]
    for stage in text.split("\nFROM ")[1:] if not text.startswith("FROM") else text.split("FROM ")[1:]:
        assert "USER ringattn" in stage and 'ENTRYPOINT ["ringattn"]' in stage
    extras = set(re.findall(r"\.\[(\w+)\]", text))
    assert extras <= set(PROJECT.get("project", {}).get("optional-dependencies", extras))


def test_scripts_are_executable_and_parse() -> None:
    scripts = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    assert {p.name for p in scripts} == {"run", "test", "check", "setup"}
    for script in scripts:
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
        assert "set -euo pipefail" in script.read_text()


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    project = PROJECT.get("project", {})
    wanted = [*project.get("dependencies", []), *project.get("optional-dependencies", {}).get("dev", [])]
    names = {re.split(r"[<>=!\[ ]", spec)[0].lower().replace("_", "-") for spec in wanted}
    assert names <= {name.lower().replace("_", "-") for name in pins}


def test_developers_get_what_the_mpi_tests_need() -> None:
    """scripts/test installs the extra dev: no MPI test is skipped after it."""
    assert '/scripts/setup" dev' in (ROOT / "scripts" / "test").read_text()
    extras = PROJECT.get("project", {}).get("optional-dependencies", {})
    assert set(extras.get("mpi", [])) <= set(extras.get("dev", []))


def test_torch_is_not_asked_for_by_an_open_name() -> None:
    """Plain `pip install torch` may bring gigabytes: the scripts install the pinned one first."""
    assert "grep '^torch==' constraints.txt" in (ROOT / "scripts" / "setup").read_text()


def test_doctor_names_the_extras_that_there_are() -> None:
    """An extra that nothing uses is a promise: `hf` was one."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", section, re.MULTILINE)) - {"dev"}
    named = {name for _, command in EXTRAS.values() for name in re.findall(r"ringattn\[(\w+)\]", command)}
    pages = "".join(page.read_text() for page in ROOT.glob("docs/*.md"))
    assert extras == named == set(re.findall(r"ringattn\[(\w+)\]", pages))
