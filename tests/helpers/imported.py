"""Import files that belong to no package: examples, the program of the figures, generated kernels."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """The module that a file makes, new in each call."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
