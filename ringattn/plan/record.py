"""The schema of the JSON that `Plan.to_json` writes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..errors import InvalidInput
from ..files import Count, decode

#: A number of heads in the JSON of a plan.
Heads = Annotated[int, Meta(ge=1, le=1 << 16)]


class PlanRecord(Struct):
    """The fields that `Plan.to_json` writes; `ringattn plan` adds counted numbers."""

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
    block: list[tuple[int, int, str]] | None = None
    reproducible: int | None = None
    partition: list[tuple[int, int]] | None = None
    q_layout: str | None = None
    q_tokens: Annotated[int, Meta(le=(1 << 63) - 1)] = 0
    q_partition: list[tuple[int, int]] | None = None


def read_record(text: str, version: int) -> PlanRecord:
    """The record in a JSON text. Raises InvalidInput for other text, or for a format other than `version`."""
    record = decode(text, PlanRecord, "the plan")
    if record.format != version:
        raise InvalidInput(
            f"the plan has format {record.format}, but this ringattn reads format {version}; make the plan again"
        )
    return record
