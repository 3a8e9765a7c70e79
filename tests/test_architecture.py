"""Imports go one way, plans need no torch, and nothing swallows exceptions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from loaded_modules import modules_after

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringattn"
#: Packages, and modules of the root. Each imports only from those before it.
ORDER = (
    "errors",
    "registry",
    "text",
    "dtypes",
    "progress",
    "cache",
    "files",
    "transport",
    "pattern",
    "layout",
    "machine",
    "plan",
    "kernels",
    "timing",
    "planner",
    "reporting",
    "runtime",
    "numerics",
    "functional",
    "nn",
    "compat",
    "config",
    "experiments",
    "cli",
)
#: What is imported on machines without torch.
NO_TORCH = (
    "errors",
    "registry",
    "text",
    "dtypes",
    "progress",
    "cache",
    "files",
    "pattern",
    "layout",
    "machine",
    "plan",
    "timing",
    "planner",
    "reporting",
    "config",
    "experiments.study",
    "cli.main",
    "cli.plan",
    "cli.simulate",
    "cli.simulate_study",
    "transport.launcher",
)
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(name: str, *, functions: bool = True) -> set[str]:
    """Modules of this package that a module imports, those under TYPE_CHECKING too; `functions`: within functions
    too."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if functions else top_level(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in package if part][: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                found.add(full if full in FILES else module)
    return found - {name, ""}  # the package itself: its version


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import; `if TYPE_CHECKING` does not."""
    return [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("", "__main__")])
def test_imports_go_one_way(name: str) -> None:
    here = name.split(".")[0]
    assert here in ORDER, f"{here} has no place in the order"
    for other in imports(name):
        there = other.split(".")[0]
        assert there in ORDER and ORDER.index(there) <= ORDER.index(here), f"{name} imports {other}"


def test_no_module_imports_itself_through_others() -> None:
    """No circle, inside packages neither. Imports for types and imports within functions count."""
    after = {name: imports(name) & FILES.keys() for name in FILES if name}
    while free := [name for name, others in after.items() if not others]:
        for name in free:
            del after[name]
        for others in after.values():
            others -= set(free)
    assert not after, f"circles among {sorted(after)}"


def test_the_root_is_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


@pytest.mark.parametrize("name", FILES)
def test_no_torch_before_it_is_needed(name: str) -> None:
    if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in NO_TORCH):
        return
    for node in top_level(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "torch" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] != "torch"


@pytest.mark.parametrize("name", FILES)
def test_exceptions_are_caught_by_name_and_files_stay_short(name: str) -> None:
    path = FILES[name]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            names = ast.unparse(node.type) if node.type else "everything"
            assert names not in ("everything", "Exception", "BaseException")
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize(
    "statement",
    [
        "import ringattn",
        "import ringattn as ra; ra.make_plan(ra.Causal(), tokens=1 << 20, ranks=8, layout='zigzag').picture()",
        "import sys; sys.argv = ['ringattn', 'plan', 'ranks=4']; from ringattn.cli.main import main; main()",
        "import sys; sys.argv = ['ringattn', 'simulate', 'ranks=4']; from ringattn.cli.main import main; main()",
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

    modules = {name.split(".")[0] for name in FILES}
    assert not modules & set(ringattn.__all__)
