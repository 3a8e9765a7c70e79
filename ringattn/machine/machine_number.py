"""The declaration of one number of a machine: unit, meaning, allowed values, and the effect that needs the number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, ValidationError, convert

from ..errors import InvalidInput
from ..files import Count
from ..text import shorten

#: The calibrations that measure a number: "every" calibration, or only a calibration of several "ranks".
MeasuredBy = Literal["every", "ranks"]
T = TypeVar("T")
#: The least number that is not 0, and the largest: times, bytes and energies of whole jobs are floats then.
LEAST, MOST = 1e-30, 1e30


@dataclass(frozen=True, kw_only=True)
class MachineNumber:
    """The declaration of one number of a machine, kept as metadata of its field in `Machine`.

    The checks of `Machine`, the units in machine files, the keys `machine.*` of the command line, their help, and the
    effects that a simulation reports as not modelled follow from these declarations.
    """

    #: The unit in machine files and in reports.
    unit: str
    #: What the number is, as a noun phrase.
    meaning: str
    #: A value that is allowed. The type of the example is the type of the number: float, int or bool.
    example: float | int | bool
    #: Whether 0 is allowed. A negative number never is, and a whole number is at least 1.
    may_be_zero: bool = False
    #: What the model does where the number is None; "" where it only leaves `effect` out, or where None is not allowed.
    default: str = ""
    #: The effect that the model leaves out where the number is None; "" where it leaves nothing out.
    effect: str = ""
    #: The key of `Timeline.exposed` that is not modelled where the number is None; "" where there is no such key.
    cause: str = ""
    #: The calibrations that measure the number; None: the number is not measured.
    measured_by: MeasuredBy | None = None

    def with_default(self, default: T) -> T:
        """The field of a dataclass that holds the number, and this declaration as its metadata `number`."""
        declared: Any = field(default=default, metadata={"number": self})
        return declared

    @property
    def python_type(self) -> type[float] | type[int] | type[bool]:
        """The type of the number."""
        return type(self.example)

    @property
    def may_be_none(self) -> bool:
        """Whether the number may be None."""
        return bool(self.default or self.effect)

    @property
    def help(self) -> str:
        """Meaning and unit, and what the model does without the number."""
        unit = "" if self.python_type is bool else f" [{self.unit}]"
        otherwise = self.default or (f"without it the model leaves out {self.effect}" if self.effect else "")
        return f"{self.meaning}{unit}{otherwise and '; '}{otherwise}"

    @property
    def kind(self) -> Any:
        """The type of the number with its bounds, as msgspec reads it."""
        bounded: Any = self.python_type
        if bounded is int:
            bounded = Count
        elif bounded is float:
            bounded = Annotated[float, Meta(ge=self._least, le=MOST)]
        return bounded | None if self.may_be_none else bounded

    def check(self, name: str, value: object) -> None:
        """Raise InvalidInput where `value` is not allowed for the number called `name`."""
        try:
            convert(value, self.kind)
        except ValidationError:
            example = str(self.example) if self.python_type is bool else f"{self.example:g}"
            raise InvalidInput(
                f"machine: {name}={shorten(repr(value), 60)} must be {self._allowed()}; {name} is {self.help}; try "
                f"{name}={example}"
            ) from None

    @property
    def _least(self) -> float:
        return 0.0 if self.may_be_zero else LEAST

    def _allowed(self) -> str:
        """The allowed values in words."""
        number = f"a number from {self._least:g} to {MOST:g}"
        words = {bool: "True or False", int: "a whole number >= 1", float: number}[self.python_type]
        return f"{words}, or None" if self.may_be_none else words
