"""Print the tests to run first for changed files: scripts/test for ringattn/plan/work.py; without files, of git diff.

They are the tests that mirror the changed package, those that import a changed module, and those that guard the whole
tree. The rest is for scripts/test.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Tests of imports, words, and public names, which any change can break.
ALWAYS = ("tests/test_architecture.py", "tests/test_text.py")
#: Tests of a package that lie elsewhere than in the folder of its name.
ELSEWHERE = {"docs": ["tests/test_docs.py"], "conf": ["tests/cli"], "scripts": ["tests/test_packaging.py"]}


def changed() -> list[str]:
    """Files that differ from the last commit, and files that git does not know."""
    commands = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    return [
        line
        for command in commands
        for line in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


def tests_of(file: str) -> set[str]:
    """The test files and folders for one file, relative to the root."""
    parts = Path(file).with_suffix("").parts
    if parts[0] == "tests":
        return {file} if Path(file).name.startswith("test_") else set()
    if parts[0] != "ringattn":
        return set(ELSEWHERE.get(parts[0], ()))
    folder = f"tests/{'/'.join(parts[1:-1])}" if len(parts) > 2 else ""
    while folder and not (ROOT / folder).is_dir():
        folder = str(Path(folder).parent)
    module = re.escape(".".join(part for part in parts if part != "__init__"))
    name = re.escape(parts[-1])
    uses = re.compile(rf"\b{module}\b|from {re.escape('.'.join(parts[:-1]))} import .*\b{name}\b")
    found = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if uses.search(path.read_text())
    }
    return {one for one in found if not (folder and one.startswith(f"{folder}/"))} | ({folder} if folder else set())


def main() -> None:
    files = sys.argv[1:] or changed()
    if missing := [file for file in files if not (ROOT / file).exists()]:
        sys.exit(f"{missing[0]}: no such file below {ROOT}")
    print("\n".join(sorted({test for file in files for test in tests_of(file)} | {*ALWAYS})))


if __name__ == "__main__":
    main()
