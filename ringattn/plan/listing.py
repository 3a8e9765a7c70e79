"""A rank's plan as a listing to print or to store: what it posts, computes and waits for in each step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..text import plural
from .leaves import Nodes
from .row_sets import Ranges, RowSet
from .steps import BLOCKS, SUMS, Part, RankPlan, Step

#: The version of the JSON: rises when a field changes its meaning.
LISTING = 1
#: The most runs of rows that a line of text names.
RUNS = 3


@dataclass(frozen=True)
class Listing:
    """What one rank does in each pass, step by step, counted from its plan; `Plan.listing` makes one.

    `str` gives text, `to_json` JSON. `record` is the content of the JSON:

    - "listing": the version of this format; "plan": the plan's hash; "rank"; "rows": the positions of the rank's rows,
      each run as [start, stop, step]; "block", if other rows than k and v travel: [heads, width, dtype] of each tensor.
    - "forward" and "backward": "travels", "kv" or "q", and "steps". A step has "post", the messages that begin; then
      "compute", the visits; then "wait", the numbers of the messages that the rank waits for.
    - A message has a "number", which counts the messages of the pass; "do", "send" or "receive"; "peer"; "tag";
      "bytes"; "due", the step whose "wait" names it; and "parts".
    - A part or visit has a "kind", see `steps.Kind`; "owner"; "heads" and "rows", null for all: one list of
      [start, stop, step] for all heads, or one for each. A visit also has "pairs" of queries and keys over all heads,
      and "kept" if the forward keeps its block for the backward.

    With Ulysses groups, owners of blocks are numbered by group, and rows are those of the group.
    """

    plan_hash: str
    ranks: int
    rank_plan: RankPlan
    shard: Ranges
    travels: tuple[str, str]
    #: The bytes of a part of a message, the pairs of a visit, and the rows of a whole block.
    part_bytes: Callable[[Part], int]
    pairs: Callable[[Part], int]
    block_rows: Callable[[Part], int]
    #: (heads, width, dtype) of each tensor of a block; None: k and v.
    block: Sequence[tuple[int, int, str]] | None = None

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of the JSON."""
        passes = zip(
            ("forward", "backward"), self.travels, (self.rank_plan.forward, self.rank_plan.backward), strict=True
        )
        return {
            "listing": LISTING,
            "plan": self.plan_hash,
            "rank": self.rank_plan.rank,
            "rows": _as_lists(self.shard),
            **({} if self.block is None else {"block": [*map(list, self.block)]}),
            **{name: {"travels": travels, "steps": self._list_steps(steps)} for name, travels, steps in passes},
        }

    def to_json(self) -> str:
        """`record` as JSON."""
        return json.dumps(self.record, indent=2)

    def __str__(self) -> str:
        record = self.record
        rows = ", ".join(map(_run, self.shard)) or "none"
        lines = [f"plan {self.plan_hash}  rank {record['rank']} of {self.ranks}: rows {rows}"]
        if self.block is not None:
            lines.append(f"kv is a block of {describe_block(self.block)}, not k and v")
        sent = []
        for name in ("forward", "backward"):
            lines.append(f"{name}, {'keys' if record[name]['travels'] == 'kv' else 'queries'} travel")
            steps = record[name]["steps"]
            lines += self._print_steps(steps)
            sizes = [one["bytes"] for step in steps for one in step["post"] if one["do"] == "send"]
            sent.append(f"{sum(sizes):,} B in {plural(len(sizes), 'message')} {name}")
        return "\n".join([*lines, f"sends {', '.join(sent)}"])

    def _list_steps(self, steps: Sequence[Step]) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = [{"post": [], "compute": [], "wait": []} for _ in steps]
        number = 0
        for step, record in zip(steps, listed, strict=True):
            for due, sends, recvs in step.posts:
                for do, hops in (("send", sends), ("receive", recvs)):
                    for hop in hops:
                        size = sum(map(self.part_bytes, hop.parts))
                        message = {
                            "number": number,
                            "do": do,
                            "peer": hop.peer,
                            "tag": hop.tag,
                            "bytes": size,
                            "due": due,
                        }
                        record["post"].append({**message, "parts": [*map(_facts, hop.parts)]})
                        listed[due]["wait"].append(number)
                        number += 1
            for part in step.visits:
                kept = {"kept": True} if part in self.rank_plan.saved else {}
                record["compute"].append({**_facts(part), "pairs": self.pairs(part), **kept})
        return listed

    def _print_steps(self, steps: list[dict[str, Any]]) -> Iterator[str]:
        messages = {message["number"]: message for step in steps for message in step["post"]}
        for index, step in enumerate(steps):
            before = ""
            for word, name, rows, size in self._cells(step, messages):
                number = "" if before else str(index)
                yield f"{number:>3} {'' if word == before else word:<8} {name:<18} {rows:<42} {size}".rstrip()
                before = word

    def _cells(self, step: dict[str, Any], messages: dict[int, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
        """The columns of each line of a step, but its number."""
        for message in step["post"]:
            way = "to" if message["do"] == "send" else "from"
            for at, part in enumerate(message["parts"], 1):
                size = f"{message['bytes']:>16,} B" if at == len(message["parts"]) else ""
                yield "post", f"{_name(part)} {way} {message['peer']}", self._name_rows(part), size
        for visit in step["compute"]:
            kept = ", kept" if visit.get("kept") else ""
            yield "compute", _name(visit), self._name_rows(visit), f"{visit['pairs']:>16,} pairs{kept}"
        received = [messages[number] for number in step["wait"] if messages[number]["do"] == "receive"]
        if received:
            yield "wait", ", ".join(_name(part) for message in received for part in message["parts"]), "", ""

    def _name_rows(self, part: dict[str, Any]) -> str:
        if part["kind"] not in (*BLOCKS, *SUMS):
            return "rows and heads of one member"
        if part["rows"] is None:
            return f"all {self.block_rows(Part(part['kind'], part['owner'])):,} rows"
        first, *others = part["rows"]
        runs = [_run(range(*run)) for run in first]
        if "nodes" in part:
            return f"{plural(len(part['nodes']), 'node')} of trees"
        more = f" and {len(runs) - RUNS:,} more runs" if len(runs) > RUNS else ""
        heads = part["heads"]
        named = f"heads {heads[0]} .. {heads[-1]}" if len(heads) > 1 else f"head {heads[0]}"
        return f"local rows {', '.join(runs[:RUNS])}{more}, {named}" + (", other rows each" if others else "")


def describe_block(block: Sequence[tuple[int, int, str]]) -> str:
    """The tensors of a row as text, such as "1 x 512 bfloat16 + 1 x 64 bfloat16"."""
    return " + ".join(f"{heads} x {width} {dtype}" for heads, width, dtype in block)


def _facts(part: Part) -> dict[str, Any]:
    rows, heads = part.row_set, None
    listed = None
    named = {"nodes": [list(name) for name in rows.names]} if isinstance(rows, Nodes) else {}
    if isinstance(rows, RowSet):
        heads, listed = list(rows.heads), [_as_lists(runs) for runs in rows.rows]
    return {"kind": part.kind, "owner": part.owner, "heads": heads, "rows": listed, **named}


def _as_lists(runs: Ranges) -> list[list[int]]:
    return [[run.start, run.stop, run.step] for run in runs]


def _name(part: dict[str, Any]) -> str:
    return f"{part['kind']} of {part['owner']}"


def _run(run: range) -> str:
    if len(run) == 1:
        return f"{run[0]:,}"
    return f"{run[0]:,} .. {run[-1]:,}" + (f" step {run.step}" if run.step != 1 else "")
