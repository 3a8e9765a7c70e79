"""A plan as JSON: the schema of what `Plan.to_json` writes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..errors import InvalidInput
from ..files import Count, decode

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
    q_layout: str | None = None
    q_tokens: Annotated[int, Meta(le=(1 << 63) - 1)] = 0
    q_partition: list[tuple[int, int]] | None = None


def read_record(text: str, version: int) -> PlanRecord:
    """The record in a JSON text. Raises InvalidInput."""
    record = decode(text, PlanRecord, "the plan")
    if record.format != version:
        raise InvalidInput(
            f"the plan has format {record.format}, this ringattn reads format {version}; make the plan anew"
        )
    return record
