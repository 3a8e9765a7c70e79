"""Without mpi4py, mpirun or an MPI library: what is missing, and the command that brings it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ringattn as ra
from ringattn.cli import doctor, run
from ringattn.cli.config.groups import TransportGroup
from ringattn.cli.config.schema import RunConfig
from ringattn.transport.mpi import Mpi

COMMAND = "pip install 'ringattn[mpi]'"


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ra.Unsupported) as caught:
        Mpi()
    assert "needs mpi4py" in str(caught.value) and COMMAND in str(caught.value)
    assert doctor._mpi_library() == f"unknown without mpi4py; try: {COMMAND}"


def test_without_an_mpi_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py is there and raises RuntimeError where it finds no library to load."""

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "mpi4py.MPI":
                raise RuntimeError("cannot load MPI library\nand more")

    package = ModuleType("mpi4py")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ra.Unsupported, match=r"\(cannot load MPI library\); try: pip install 'ringattn\[mpi\]'"):
        Mpi()


def test_an_option_of_mpi_is_refused_elsewhere() -> None:
    config = RunConfig(transport=TransportGroup("gloo", gpu_aware=True))
    with pytest.raises(ra.InvalidInput, match="gpu_aware=true is an option of transport=mpi, not of gloo"):
        run.main(config)


def test_doctor_looks_for_mpirun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert doctor._mpirun() == f"missing; try: {COMMAND}"
    ours, theirs = tmp_path / "env" / "mpirun", tmp_path / "bin" / "mpirun"
    for path in (theirs, ours):
        path.parent.mkdir()
        path.write_text("")
        path.chmod(0o755)
    assert doctor._mpirun() == f"{ours}, not on the PATH, which has {theirs}"
    ours.unlink()
    assert doctor._mpirun() == str(theirs)
