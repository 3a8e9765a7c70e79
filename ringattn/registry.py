"""Patterns, schedules, kernels ... by name, from this package and from installed packages (entry points)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from .errors import InvalidInput

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping from names to objects; looking up a name imports its module.

    `kind` is a plural noun such as "patterns". `builtin` maps each name of this package to "module:attribute", with the
    module relative to `ringattn`. An installed package adds a name with an entry point of the group "ringattn.<kind>",
    for example in its pyproject.toml:

        [project.entry-points."ringattn.patterns"]
        Recent = "mypackage.recent:Recent"
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.builtin = kind, builtin

    @cached_property
    def installed(self) -> dict[str, EntryPoint]:
        """Entry points of installed packages by name. Raises InvalidInput if a name is taken twice."""
        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=f"ringattn.{self.kind}"):
            if point.name in self.builtin or point.name in points:
                raise InvalidInput(
                    f"{_distribution(point)} offers {self.kind} {point.name!r}, a name that is in use; "
                    "rename its entry point"
                )
            points[point.name] = point
        return points

    def check_installed(self) -> None:
        """Raise InvalidInput if no entry point of this kind is installed, because ringattn's installation is outdated.

        For kinds of which ringattn itself declares entry points.
        """
        if not self.installed:
            raise InvalidInput(
                f"the installed ringattn declares no {self.kind}: it was installed before its source had them; install "
                "it again, with scripts/setup or pip install -e ."
            )

    def __getitem__(self, name: str) -> T:
        """The object of this name. Raises KeyError for an unknown name, InvalidInput if its package is broken."""
        if name in self.builtin:
            module, attribute = self.builtin[name].split(":")
            builtin: T = getattr(import_module(f"{__package__}.{module}"), attribute)
            return builtin
        point = self.installed[name]
        try:
            loaded: T = point.load()
        except (ImportError, AttributeError) as error:
            raise InvalidInput(
                f"{_distribution(point)} offers {self.kind} {name!r}, which cannot be imported ({error}); "
                "repair or uninstall the package"
            ) from error
        return loaded

    def __iter__(self) -> Iterator[str]:
        yield from self.builtin
        yield from self.installed

    def __len__(self) -> int:
        return len(self.builtin) + len(self.installed)

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.installed


def _distribution(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist is not None else "an installed package"
