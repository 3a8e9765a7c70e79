"""Imports go one way, plans need no torch, and nothing swallows exceptions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringattn"
#: A file imports only from entries above its own. What stands before "softmax" needs no torch.
ORDER = (
    "errors", "text", "progress", "cache", "pattern", "partition", "balanced", "layout", "work", "cut", "moves", "wanted", "demand", "transposed", "steps", "sizes",
    "schedules", "rotation", "picture", "timing", "choice", "plan", "memory", "softmax", "pool", "kernels", "buffers", "transport",
    "launcher", "script", "rows", "held", "executor", "remat", "teams", "autocast", "agreement", "autograd", "stream", "functional", "nn",
    "factories",
    "files", "provenance", "machine_file", "groups", "config", "config_folders", "modes", "overrides", "verb_help", "asked", "stored", "data", "sampling", "report", "simulator", "bench", "calibrate", "study", "job", "commands", "cli",
    "__main__",
)  # fmt: skip
NO_TORCH = (
    *ORDER[: ORDER.index("softmax")],
    "launcher",
    "files",
    "provenance",
    "machine_file",
    "groups",
    "config",
    "config_folders",
    "modes",
    "overrides",
    "verb_help",
    "asked",
    "report",
    "study",
    "cli",
    "__main__",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, *, functions: bool) -> set[str]:
    """Entries of ORDER, or other packages, that a file imports; `functions` counts imports within functions too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if functions else iter(top_level(tree))
    parts = path.relative_to(ROOT).with_suffix("").parts
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else ()
            if path.name == "__init__.py" and node.level:
                base = parts[: len(parts) - node.level]
            module = ".".join((*base, *([node.module] if node.module else [])))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import; `if TYPE_CHECKING` does not."""
    found: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        found.append(node)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = place(path)
    if here == "__init__":
        return
    assert here in ORDER, f"{here} has no place in the order"
    for name in imported(path, functions=True):
        if name.startswith("ringattn."):
            other = name.split(".")[1]
            if other in ORDER and other != here:
                checking = "TYPE_CHECKING" in path.read_text() and name not in imported(path, functions=False)
                assert ORDER.index(other) < ORDER.index(here) or checking, f"{here} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_torch_before_it_is_needed(path: Path) -> None:
    if place(path) in NO_TORCH:
        assert not {name for name in imported(path, functions=False) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_exceptions_are_caught_by_name_and_files_stay_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            names = ast.unparse(node.type) if node.type else "everything"
            assert names not in ("everything", "Exception", "BaseException")
    assert len(path.read_text().splitlines()) <= 500


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ringattn",
        "import ringattn as ra; ra.make_plan(ra.Causal(), tokens=1 << 20, ranks=8, layout='zigzag').picture()",
        "import sys; sys.argv = ['ringattn', 'plan', 'ranks=4']; import ringattn.cli; ringattn.cli.main()",
        "import sys; sys.argv = ['ringattn', 'simulate', 'ranks=4']; import ringattn.cli; ringattn.cli.main()",
    ],
)
def test_plans_do_not_import_torch(statement: str) -> None:
    assert "torch" not in modules_after(statement)


def test_the_public_names_exist() -> None:
    import ringattn

    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
        assert name in dir(ringattn)
    with pytest.raises(AttributeError, match="no attribute 'ring_atention'"):
        ringattn.ring_atention  # noqa: B018


def test_module_names_are_not_function_names() -> None:
    import ringattn

    modules = {place(path) for path in FILES}
    assert not modules & set(ringattn.__all__)
