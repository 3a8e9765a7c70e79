"""A plan as JSON: the schema of what `Plan.to_json` writes."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import asdict

from ..errors import InvalidInput
from ..files import Count, decode
from ..layout.regular import restore_layout

#: Keys of a record beside the arguments of `build_plan`.
ADDED = ("format", "hash", "pattern", "partition")
#: Heads of a plan that is read.
Heads = Annotated[int, Meta(ge=1, le=1 << 16)]


class PlanRecord(Struct):
    """What `Plan.to_json` writes; beside it `ringattn plan` writes what it counted."""

    format: int
    hash: str
    pattern: str
    tokens: Annotated[int, Meta(le=(1 << 63) - 1)]
    ranks: Count
    layout: str
    schedule: str
    heads: Heads
    kv_heads: Heads
    head_dim: Count
    value_dim: Count
    dtype: str
    batch: Annotated[int, Meta(le=(1 << 63) - 1)]
    comm_dtype: str | None
    rotate: str
    partition: list[tuple[int, int]] | None = None


def read_record(text: str, version: int) -> tuple[PlanRecord, dict[str, Any]]:
    """The record in a JSON text, and the arguments of `build_plan`. Raises InvalidInput."""
    record = decode(text, PlanRecord, "the plan")
    if record.format != version:
        raise InvalidInput(
            f"the plan has format {record.format}, this ringattn reads format {version}; make the plan anew"
        )
    arguments = {name: value for name, value in asdict(record).items() if name not in ADDED}
    if record.partition is not None:
        arguments["layout"] = restore_layout(record.layout, record.tokens, record.ranks, record.partition)
    return record, arguments
