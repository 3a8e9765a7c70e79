"""Imports go one way, plans need no torch, and nothing swallows exceptions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from command_line import modules_after

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ringattn"
#: Packages, and modules of the root. Each imports only from those before it: first what a job on ranks may import.
ORDER = (
    *("errors", "registry", "text", "dtypes", "cache", "files", "transport", "pattern", "layout", "machine", "plan"),
    *("kernels", "runtime", "call", "recurrence", "inference", "nn", "train", "integrations", "simulator"),
    *("cli", "lab"),
)
#: The only import against the order, within a function: `auto` asks the timing model.
AUTO = ("call.planner", "simulator.timing.auto")
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

#: What is imported on machines without torch.
NO_TORCH = [
    f"ringattn.{name}"
    for name in FILES
    if re.match(
        r"(errors|registry|text|dtypes|cache|files|pattern|layout|machine|plan|call\.planner|recurrence\.runs|transport\.launcher"
        r"|simulator\.(timing|reporting|progress)|cli\.(config|counts|main|plan|simulate)"
        r"|lab\.(models|advise|pages|play|study|verbs\.(advise|estimate|play)))(\.|$)",
        name,
    )
]


@cache
def read(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def nodes(name: str) -> list[ast.AST]:
    return [*ast.walk(read(name))]


@cache
def imports(name: str, *, functions: bool = True) -> set[str]:
    """Modules of this package that a module imports: those under TYPE_CHECKING too, by import_module(".name",
    __package__) too, and with `functions` within functions too."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in nodes(name) if functions else top_level(read(name)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in package if part][: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{module}.{alias.name}" if module else alias.name
                found.add(full if full in FILES else module)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            match = re.fullmatch(r"(\.+)(.*)", named_by(node.args[0]))
            if match is not None:
                base = [part for part in package if part][: len(package) - len(match[1]) + 1]
                found.add(".".join([*base, match[2]]))
    return found - {name, ""}  # the package itself: its version


def named_by(node: ast.expr) -> str:
    """The text of a literal, with * for what an f-string puts in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "*"


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run on import; `if TYPE_CHECKING` does not."""
    return [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    ]


def test_imports_go_one_way() -> None:
    against = []
    for name in FILES.keys() - {"", "__main__"}:
        here = ORDER.index(name.split(".")[0])
        against += [
            (name, other)
            for other in imports(name)
            if ORDER.index(other.split(".")[0]) > here and (name, other) != AUTO
        ]
    assert not against
    assert AUTO[1] not in imports("call.planner", functions=False)


def test_nothing_imports_the_laboratory() -> None:
    """By no string either, such as import_module(".lab.study") or "lab.bench:SUITES": its parts are entry points."""
    for name in FILES:
        if name.split(".")[0] != "lab":
            strings = [node for node in nodes(name) if isinstance(node, ast.Constant | ast.JoinedStr)]
            found = [text for text in map(named_by, strings) if re.fullmatch(r"[\w.*]*(?<!\w)lab(?!\w)[\w.:*]*", text)]
            assert not found and not [other for other in imports(name) if other.split(".")[0] == "lab"], name


def test_only_the_command_line_knows_hydra() -> None:
    users = {name.split(".")[0] for name, path in FILES.items() if re.search(r"hydra\b|omegaconf", path.read_text())}
    assert users <= {"cli", "lab"}


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


def test_exceptions_are_caught_by_name() -> None:
    for name in FILES:
        for node in nodes(name):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                assert caught not in ("everything", "Exception", "BaseException"), name


@pytest.mark.parametrize(
    "statement",
    [
        f"import ringattn; from importlib import import_module; [*map(import_module, {NO_TORCH})]",
        "import ringattn as ra; ra.make_plan(ra.Causal(), tokens=1 << 20, ranks=8, layout='zigzag').picture()",
        "import sys; sys.argv = ['ringattn', 'plan', 'ranks=4']; from ringattn.cli.main import main; main()",
        "import sys; sys.argv = ['ringattn', 'simulate', 'ranks=4']; from ringattn.cli.main import main; main()",
    ],
)
def test_plans_import_no_torch_and_no_benchmarks(statement: str) -> None:
    loaded = modules_after(statement)
    assert "torch" not in loaded and not [name for name in loaded if name.startswith("ringattn.lab.bench")]


def test_the_public_names_exist() -> None:
    import ringattn

    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
        assert name in dir(ringattn)
    with pytest.raises(AttributeError, match="no attribute 'ring_atention'"):
        ringattn.ring_atention  # noqa: B018


def test_type_checkers_see_the_public_names_where_programs_find_them() -> None:
    import ringattn

    imports = [node for node in nodes("") if isinstance(node, ast.ImportFrom) and node.level]
    seen = {alias.name: node.module or alias.name for node in imports for alias in node.names}
    assert seen == {**ringattn._HOMES, "nn": "nn", "train": "train"}


def test_module_names_are_not_function_names() -> None:
    import ringattn

    modules = {name.split(".")[0] for name in FILES}
    assert not modules & set(ringattn.__all__)


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for name in FILES:
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_a_job_on_ranks_loads_no_simulator() -> None:
    statement = (
        "import torch, ringattn as ra; x = torch.randn(1, 1, 8, 4, requires_grad=True); "
        "ra.virtual_attention(x, x, x, 'Causal()', ranks=2, schedule='ring').sum().backward()"
    )
    names = [name for name in modules_after(statement) if name.startswith("ringattn.")]
    assert "ringattn.runtime.ring" in names
    assert not [name for name in names if name.split(".")[1] in ("simulator", "cli", "lab")]


#: Prints the files of the package that a causal ring over contiguous shards executes, forward and backward.
ONE_CALL = """
import sys
import torch
import ringattn as ra

files = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        files.add(frame.f_code.co_filename)
q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
attend = ra.virtual_attention
pattern = ra.Causal()
sys.setprofile(note)
attend(q, k, v, pattern, ranks=4, layout="contiguous", schedule="ring").sum().backward()
sys.setprofile(None)
print(*files, sep="\\n")
"""


def test_one_call_can_be_followed() -> None:
    """docs/architecture.md lists the files to read, which are few, and has a line for each package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    story = page[page.index("## A call's life") : page.index("## A simulation's life")]
    to_read = re.findall(r"\(\.\./ringattn/([\w/]+\.py)\)", story)
    assert len(to_read) == len(set(to_read)) <= 16
    done = subprocess.run([sys.executable, "-c", ONE_CALL], capture_output=True, text=True, check=True, timeout=120)
    executed = {
        str(Path(line).relative_to(PACKAGE)) for line in done.stdout.splitlines() if line.startswith(str(PACKAGE))
    }
    assert set(to_read) <= executed, "every file to read takes part in the call"
    rows = page[page.index("## Packages") : page.index("## State between calls")]
    listed = [
        name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)/?`", row)
    ]
    assert set(listed) == set(ORDER), "every package has a line"
    assert [*map(ORDER.index, listed)] == sorted(map(ORDER.index, listed)), "each imports from the lines above it"


#: What makes a table at the level of a module that outlives a call.
TABLES = {
    "Cache",
    "WeakValueDictionary",
    "WeakKeyDictionary",
    "WeakIdKeyDictionary",
    "OrderedDict",
    "ContextVar",
    "count",
}


def state_of(module: str) -> set[str]:
    """Names of a module that hold something between calls: tables, cached functions, and what `global` changes."""
    names = set()
    for node in nodes(module):
        if isinstance(node, ast.Global):
            names |= {*node.names}
        if isinstance(node, ast.FunctionDef):
            marks = {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
            names |= {node.name} if marks & {"lru_cache", "cache"} else set()
    for node in read(module).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if (isinstance(value, ast.Call) and ast.unparse(value.func) in TABLES) or (
            isinstance(value, ast.Dict) and not value.keys
        ):
            names |= {ast.unparse(target) for target in targets}
    return names


def test_state_between_calls_is_listed() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = page[page.index("## State between calls") : page.index("## Add a part")].splitlines()
    listed = {
        (file, name)
        for row in rows
        for file in re.findall(r"`([\w/]+\.py)`", row)
        for name in re.findall(r"`(\w+)`", row)
    }
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for module, path in FILES.items()
        if module.split(".")[0] not in ("simulator", "cli", "lab")
        for name in state_of(module)
    }
    assert found - listed == set()
    assert {name for _, name in listed} == {name for _, name in found}
