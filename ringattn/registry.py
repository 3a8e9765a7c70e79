"""Parts by name, which other packages may add to: patterns, schedules, kernels, transports, bench suites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from .errors import InvalidInput

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """The parts of one kind by name. A part is imported when it is asked for.

    `own` gives for each name of this package "module:attribute", the module relative to the package. An installed package
    adds a part of its own by an entry point of the group "ringattn.<kind>": its name, and "module:attribute".
    """

    def __init__(self, kind: str, own: dict[str, str]) -> None:
        self.kind, self.own = kind, own

    @cached_property
    def others(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages. Raises InvalidInput where two parts have one name."""
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=f"ringattn.{self.kind}"):
            if point.name in self.own or point.name in found:
                raise InvalidInput(
                    f"{_package(point)} offers {self.kind} {point.name!r}, a name that is in use; rename its entry point"
                )
            found[point.name] = point
        return found

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            module, attribute = self.own[name].split(":")
            return cast(T, getattr(import_module(f"{__package__}.{module}"), attribute))
        point = self.others[name]
        try:
            return cast(T, point.load())
        except (ImportError, AttributeError) as error:
            raise InvalidInput(
                f"{_package(point)} offers {self.kind} {name!r}, which cannot be imported ({error}); mend or uninstall it"
            ) from error

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.others

    def __len__(self) -> int:
        return len(self.own) + len(self.others)

    def __contains__(self, name: Any) -> bool:
        return name in self.own or name in self.others


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name}" if point.dist is not None else "an installed package"
