"""The figures of the pages, from plans and timelines: run, this file draws README's; conf.py draws the others."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import ringattn as ra
from ringattn.kernels.tables import ENTRY, HEADER, RECORD, Side, VisitTable
from ringattn.plan.work import Work
from ringattn.recurrence.runs import list_runs, plan_states
from ringattn.text import plural

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "benchmarks"
RANK_COLORS = (
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#3f9a97",
    "#9d755d",
    "#bab0ac",
)
#: A figure is a card with colours of its own, so that it can be read on a light page as on a dark one.
STYLE = """<style>
  .card{fill:#fff}.ink{fill:#24292f}.pale{fill:#57606a}.cell{fill:#f0f2f5}.line{stroke:#57606a;fill:#57606a}
  @media (prefers-color-scheme:dark){.card{fill:#161b22}.ink{fill:#e6edf3}.pale{fill:#9da7b3}
  .cell{fill:#262c36}.line{stroke:#9da7b3;fill:#9da7b3}}
</style>"""


def svg(width: int, height: int, title: str, body: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif" role="img">',
            f"<title>{title}</title>",
            STYLE,
            f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(
    x: float, y: float, words: str, size: int = 15, kind: str = "ink", anchor: str = "middle"
) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, color: str = "") -> str:
    paint = f'fill="{color}"' if color else 'class="cell"'
    return f'<rect {paint} x="{x:.5g}" y="{y:.5g}" width="{width:.4g}" height="{height:.4g}"/>'


def outline(mask: Any, cell: float) -> str:
    """The path around the visible pairs of a block; each row of the block sees one run of keys."""
    left, right = [], []
    for row, seen in enumerate(mask):
        keys = seen.nonzero()[0]
        if len(keys):
            left += [(keys[0], row), (keys[0], row + 1)]
            right += [(keys[-1] + 1, row), (keys[-1] + 1, row + 1)]
    points = [*left, *reversed(right)]
    scale = cell / len(mask)
    return "M" + "L".join(f"{x * scale:.3g} {y * scale:.3g}" for x, y in points) + "Z"


def draw_ring(pattern: ra.Pattern, travels: ra.Pattern, ranks: int, rows: int, title: str) -> str:
    """The mask of `pattern` in blocks, and beside it the steps of the plan of `travels`."""
    plan = ra.make_plan(
        travels, tokens=ranks * rows, ranks=ranks, layout="contiguous", schedule="ring"
    )
    mask = pattern.mask(ranks * rows)[0] > 0
    cell, left, top = 40, 74, 84
    steps = [plan.forward_steps(rank) for rank in range(ranks)]
    number_of_steps = max(len(of_rank) for of_rank in steps)
    gap, start = 104, left + ranks * cell + 86
    width, height = start + (number_of_steps - 1) * gap + cell + 24, top + ranks * cell + 24
    paths, left_panel, right_panel, arrows = [], [], [], []
    for rank in range(ranks):
        y = top + rank * cell
        left_panel.append(text(left - 12, y + 26, f"rank {rank}", 16, anchor="end"))
        for step, now in enumerate(steps[rank]):
            x = start + step * gap
            for visit in now.visits:
                block = mask[
                    rank * rows : (rank + 1) * rows, visit.owner * rows : (visit.owner + 1) * rows
                ]
                if not block.any():
                    continue
                name, color = f"b{rank}_{visit.owner}", RANK_COLORS[visit.owner]
                paths.append(f'<path id="{name}" fill="{color}" d="{outline(block, cell - 4)}"/>')
                left_panel.append(
                    f'<use href="#{name}" x="{left + visit.owner * cell + 2}" y="{y + 2}"/>'
                )
                right_panel.append(f'<use href="#{name}" x="{x + 2}" y="{y + 2}"/>')
            for hop in now.sends:
                for part in hop.parts:
                    of_block = getattr(part.row_set, "rows", None)
                    share = sum(map(len, of_block[0])) / rows if of_block else 1.0
                    middle, to = y + cell / 2, top + hop.peer * cell + cell / 2
                    first, last = x + cell + 3, x + gap - 9
                    ways = [(first, middle, last, to - 4)]
                    if hop.peer < rank:  # from the last rank around to the first one
                        half = (first + last) / 2
                        ways = [
                            (first, middle, half, middle + cell / 2 - 2),
                            (half, to - cell / 2 - 2, last, to - 4),
                        ]
                    for x1, y1, x2, y2 in ways:
                        arrows.append(
                            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" fill="none"'
                            f' stroke="{RANK_COLORS[part.owner]}" stroke-width="{1 + 4 * share:.2g}"'
                            f' marker-end="url(#a{part.owner})"/>'
                        )
    for rank in range(ranks):
        for column in range(ranks):
            left_panel.insert(
                0, box(left + column * cell + 1, top + rank * cell + 1, cell - 2, cell - 2)
            )
        for step in range(len(steps[rank])):
            right_panel.insert(
                0, box(start + step * gap + 1, top + rank * cell + 1, cell - 2, cell - 2)
            )
    heads = [
        f'<marker id="a{rank}" viewBox="0 0 6 6" refX="4" refY="3" markerWidth="9" markerHeight="9"'
        f' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L6 3L0 6Z" fill="{RANK_COLORS[rank]}"/></marker>'
        for rank in range(ranks)
    ]
    share = sum(plan.bytes_sent(rank) for rank in range(ranks)) / plan.full_ring_bytes()
    words = [
        text(left, 30, "The mask: queries x keys", 17, anchor="start"),
        text(left, 52, f"{mask.mean():.0%} of all pairs", 16, "pale", "start"),
        text(start, 30, "The plan: blocks travel", 17, anchor="start"),
        text(start, 52, f"{share:.0%} of a full ring's bytes", 16, "pale", "start"),
        *(text(left + (b + 0.5) * cell, top - 8, f"K{b}", 16, "pale") for b in range(ranks)),
        *(
            text(start + s * gap + cell / 2, top - 8, f"step {s}", 16, "pale")
            for s in range(number_of_steps)
        ),
    ]
    body = ["<defs>", *paths, *heads, "</defs>", *words, *arrows, *left_panel, *right_panel]
    return svg(width, height, title, body)


def draw_ring_figure() -> str:
    pattern = ra.Causal() & ra.Window(23)
    return draw_ring(
        pattern,
        pattern,
        6,
        16,
        "Six ranks, a causal window: what each rank computes, and what travels when",
    )


def draw_traffic() -> str:
    """Speed-up of a ring over an all-gather between two hosts, by mask and link, from the newest stored run."""
    runs = [path.read_text().splitlines() for path in RESULTS.glob("hosts_*.jsonl")]
    lines = max(runs, key=lambda lines: json.loads(lines[0])["machine"]["date"])
    cases = {case["case"]: case for case in map(json.loads, lines[1:])}
    left, bar, full = 110, 22, 250
    ratios = {
        (mask, rate): next(
            row["median"]
            for row in cases[f"{mask}_{rate}"]["ratios"]
            if row["ratio"] == "allgather / ring"
        )
        for mask in ("causal", "window", "documents")
        for rate in (100, 400, 1600)
    }
    names = {"causal": "causal", "window": "causal, window of 256", "documents": "packed documents"}
    scale = full / max(ratios.values())
    body = [
        text(24, 30, "A ring between two hosts, in times of", 17, anchor="start"),
        text(24, 52, "an all-gather's speed", 17, anchor="start"),
        text(24, 74, "forward on CPUs, two ranks on each host, 4,096", 14, "pale", "start"),
        text(24, 92, "tokens, by the rate of the link [measured]", 14, "pale", "start"),
    ]
    y, one = 106, left + scale
    for mask, name in names.items():
        body.append(text(24, y + 16, name, anchor="start"))
        y += 26
        for rate in (100, 400, 1600):
            ratio = ratios[mask, rate]
            body += [
                text(left - 8, y + 14, f"{rate:,} Mbit/s", 13, "pale", "end"),
                box(left, y, ratio * scale, bar - 4, RANK_COLORS[0]),
                text(left + 8 + ratio * scale, y + 14, f"{ratio:#.3g} times", 13, anchor="start"),
            ]
            y += bar
        body.append(f'<path class="line" stroke-dasharray="3 2" d="M{one:g} {y}v-{3 * bar + 4}"/>')
        y += 8
    body.append(text(left, y + 8, "dashed, 1: as fast as the all-gather", 13, "pale", "start"))
    return svg(
        left + full + 90, y + 20, "Speed-up of a ring over an all-gather between two hosts", body
    )


def draw_textbook() -> str:
    return draw_ring(
        ra.Causal(),
        ra.Full(),
        4,
        16,
        "Four ranks, a causal mask: every block travels around the whole ring",
    )


def draw_layouts() -> str:
    """One strip per layout, coloured by rank, and the causal work of each rank beside it."""
    tokens, ranks, unit, left, height = 48, 4, 10, 116, 44
    body = [
        text(left, 28, "Who holds which token", 17, anchor="start"),
        text(left + tokens * unit + 34, 28, "Causal work", 17, anchor="start"),
    ]
    for row, name in enumerate(("contiguous", "zigzag", "striped")):
        layout, y = ra.make_layout(name, tokens=tokens, ranks=ranks), 46 + row * (height + 16)
        body.append(text(left - 12, y + height / 2 + 5, name, anchor="end"))
        plan = ra.make_plan(ra.Causal(), tokens=tokens, ranks=ranks, layout=name, schedule="ring")
        busiest = max(plan.pairs(rank) for rank in range(ranks))
        for rank in range(ranks):
            color = RANK_COLORS[rank]
            for position in layout.positions(rank).tolist():
                body.append(box(left + position * unit, y, unit - 1, height, color))
            width = 100 * plan.pairs(rank) / busiest
            x, top = left + tokens * unit + 34, y + rank * height / ranks
            body.append(box(x, top, width, height / ranks - 1, color))
    for rank in range(ranks):
        x = left + rank * 90
        body += [
            box(x, 228, 12, 12, RANK_COLORS[rank]),
            text(x + 18, 239, f"rank {rank}", 14, "pale", "start"),
        ]
    return svg(
        left + tokens * unit + 150,
        252,
        "Layouts: which rank holds which of 48 tokens, and how much each computes",
        body,
    )


def draw_packed() -> str:
    """The same packed documents under three layouts: who holds which part, each rank's work, and what it receives."""
    lengths, ranks, unit, left, height = (14, 24, 14, 30, 10, 36, 18, 10, 30, 54), 4, 1.5, 104, 68
    tokens, pattern = sum(lengths), ra.Causal() & ra.Documents(lengths)
    starts, mask = [0, *accumulate(lengths)], pattern.mask(tokens)[0]
    side = left + tokens * unit + 6 * len(lengths) + 24
    body = [
        text(left, 28, "Who holds which part of ten documents", 17, anchor="start"),
        text(side, 28, "Work, rows received", 17, anchor="start"),
    ]
    for row, name in enumerate(("contiguous", "zigzag", "balanced")):
        layout = ra.make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern)
        plan = ra.make_plan(pattern, tokens=tokens, ranks=ranks, layout=layout, schedule="direct")
        y = 46 + row * (height + 22)
        body.append(text(left - 12, y + height / 2 + 5, name, anchor="end"))
        for rank in range(ranks):
            for part in layout.shard(rank):
                for number, (start, stop) in enumerate(pairwise(starts)):
                    first, end = max(part.start, start), min(part.stop, stop)
                    if first < end:  # a gap between documents
                        x = left + first * unit + 6 * number
                        body.append(box(x, y, (end - first) * unit, height, RANK_COLORS[rank]))
            seen = mask[layout.positions(rank)].any(0)
            seen[layout.positions(rank)] = False
            width, top = 60 * plan.pairs(rank) * ranks / plan.pairs(), y + rank * height / ranks
            body += [
                box(side, top, width, height / ranks - 1, RANK_COLORS[rank]),
                text(side + width + 6, top + 13, str(seen.sum()), 14, "pale", "start"),
            ]
    bottom = 46 + 3 * (height + 22)
    for rank in range(ranks):
        x = left + rank * 90
        body += [
            box(x, bottom, 12, 12, RANK_COLORS[rank]),
            text(x + 18, bottom + 11, f"rank {rank}", 14, "pale", "start"),
        ]
    return svg(
        int(side) + 180,
        bottom + 26,
        "Packed documents under three layouts: which rank holds what, computes and receives how much",
        body,
    )


def draw_tables() -> str:
    """A tile of query rows and the tiles of keys that its program walks through, from the table of a window."""
    block, tokens, window, tile, cell, unit, left, top = 8, 32, 17, 2, 17, 12, 92, 74
    rows = range(tile * block, (tile + 1) * block)
    works = [Work(range(1), range(1), range(tokens), (range(tokens),), 0, window)]
    side = Side(1, tokens, block)
    nothing = [side.tiles(1)[:0, 0]]
    packed = VisitTable(works, side, [1], by_key=False).pack([side.tiles(1)[:, 0] * 0], nothing)
    count, segments, entries, bounds = map(int, packed[:HEADER])
    programs = packed[HEADER:segments].reshape(count, RECORD)
    own = programs[programs[:, 1] == rows.start][0]
    _, _, first, partial, full, distance, _, _ = packed[segments:][own[4] * RECORD :][:RECORD]
    listed = packed[entries:bounds].reshape(-1, ENTRY)[first : first + partial + 1]
    width = block * unit

    def of_tile(key: int) -> float:
        return left + key // block * (width + 12)

    body = [
        text(
            left, 30, f"A program of query rows {rows.start} to {rows.stop - 1}", 17, anchor="start"
        )
    ]
    body += [
        box(of_tile(key), top + i * cell, width, cell - 1)
        for key in range(0, tokens, block)
        for i in range(block)
    ]
    body += [
        text(left - 10, top + (i + 0.8) * cell, f"row {row}", 13, "pale", "end")
        for i, row in enumerate(rows)
    ]
    kinds = dict.fromkeys(range(0, tokens, block), ("hidden", "no entry"))
    for number, (key, offset) in enumerate(listed[:partial]):
        pairs = packed[bounds + offset :][: 2 * block].reshape(block, 2)
        kinds[int(key)] = f"partial {number + 1}", f"entry ({key}, {offset})"
        x = left + 4 * (width + 12) + 20 + 90 * number
        body.append(text(x, top - 10, f"bounds {offset}", 13, "pale", "start"))
        for i, (low, high) in enumerate(pairs):
            y = top + i * cell
            body.append(
                box(of_tile(key) + low * unit, y, (high - low) * unit, cell - 1, RANK_COLORS[0])
            )
            body.append(text(x, y + 0.8 * cell, f"[{low}, {high})", 13, "ink", "start"))
    for number in range(full):
        key = int(listed[partial][0]) + number * int(distance)
        kinds[key] = "full", f"entry ({key}, 0)" if number == 0 else "the same entry"
        body.append(box(of_tile(key), top, width, block * cell - 1, RANK_COLORS[2]))
    for key, (kind, entry) in kinds.items():
        middle = of_tile(key) + width / 2
        body += [
            text(middle, top - 10, f"keys {key} to {key + block - 1}", 13, "pale"),
            text(middle, top + block * cell + 20, kind, 14),
            text(middle, top + block * cell + 38, entry, 13, "pale"),
        ]
    walk = f"It computes {partial} partial tiles, each row within its bounds, then {plural(full, 'full tile')}."
    body.append(text(left, top + block * cell + 70, walk, 14, anchor="start"))
    return svg(
        left + 4 * (width + 12) + 210,
        top + block * cell + 90,
        "The tiles of keys that the program of a tile of query rows walks through, and the bounds of each row",
        body,
    )


def draw_runs() -> str:
    """The runs of a zigzag layout, coloured by rank, and the maps that travel, round by round."""
    tokens, ranks, unit, left = 64, 4, 10, 40
    layout = ra.make_layout("zigzag", tokens=tokens, ranks=ranks)
    runs = list_runs(layout)
    plan = plan_states(layout, None, 1 << 24, ra.get_machine("cpu"))
    middles = [left + unit * (run.start + run.stop) / 2 for run in runs]
    rounds = plural(len(plan.rounds), "round")
    body = [text(left, 28, f"{len(runs)} runs, a scan in {rounds}", 17, anchor="start")]
    for number in range(len(plan.rounds) + 1):
        y = 48 + 76 * number
        for run in runs:
            width = unit * (run.stop - run.start) - 2
            body.append(box(left + unit * run.start, y, width, 22, RANK_COLORS[run.rank]))
        for source, target, _ in plan.rounds[number] if number < len(plan.rounds) else ():
            x1, x2 = middles[source], middles[target]
            body.append(
                f'<path d="M{x1:g} {y + 24:g}L{x2:g} {y + 72:g}" fill="none" stroke-width="2"'
                f' stroke="{RANK_COLORS[runs[source].rank]}"/>'
            )
    for rank in range(ranks):
        x = left + rank * 90
        y = 64 + 76 * (len(plan.rounds) + 1) - 34
        body += [
            box(x, y, 12, 12, RANK_COLORS[rank]),
            text(x + 18, y + 11, f"rank {rank}", 14, "pale", "start"),
        ]
    height = 48 + 76 * len(plan.rounds) + 82
    return svg(
        left * 2 + tokens * unit,
        height,
        "The runs of a zigzag layout, and the maps that a scan sends",
        body,
    )


def draw_schedules() -> str:
    """For each schedule a grid of ranks and steps, with the block that the rank computes with."""
    ranks, cell, left, pitch = 8, 24, 62, 300
    body = []
    names = {
        "ring": "ring, direct",
        "double_ring(4)": "double_ring(4)",
        "ulysses(4)": "ulysses(4)",
        "allgather": "allgather",
    }
    for number, (schedule, label) in enumerate(names.items()):
        x, y = left + number % 2 * pitch, 30 + number // 2 * 250
        body.append(text(x, y, label, 15, "ink", "start"))
        plan = ra.make_plan(
            ra.Full(), tokens=64, ranks=ranks, layout="contiguous", schedule=schedule, heads=8
        )
        for rank in range(ranks):
            top, at = y + 12 + rank * cell, x
            body.append(text(x - 8, top + 16, f"rank {rank}", 12, "pale", "end"))
            for step in plan.forward_steps(rank):
                owners = [visit.owner for visit in step.visits]
                if not owners:
                    body += [
                        box(at, top, cell - 2, cell - 2),
                        text(at + 11, top + 16, "⇄", 13, "pale"),
                    ]
                width = cell if len(owners) < 2 else cell / 2
                for owner in owners:
                    body += [
                        box(at, top, width - 2, cell - 2, RANK_COLORS[owner]),
                        text(at + width / 2 - 1, top + 16, str(owner), 12, "black"),
                    ]
                    at += width
                at += 0 if owners else cell
    return svg(
        left + pitch + 8 * cell + 16,
        500,
        "Schedules on eight ranks: the block in use at each step",
        body,
    )


def draw_overlap() -> str:
    """A dense ring in time: each rank computes while the next block travels, on fast and on slow links."""
    ranks, left, width, lane = 4, 66, 590, 34
    sizes: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    plan = ra.make_plan(
        ra.Full(), tokens=1 << 16, ranks=ranks, layout="contiguous", schedule="ring", **sizes
    )
    body, top = [], 26
    cases = {"links of 25 GB/s: messages hide": 25e9, "links of 2 GB/s: ranks wait": 2e9}
    machines = [
        ra.Machine(flops=4e14, latency=1e-5, bandwidth=bandwidth, merge=1e15, gamma=0.0)
        for bandwidth in cases.values()
    ]
    timelines = [ra.simulate(plan, machine) for machine in machines]
    scale = width / max(timeline.seconds for timeline in timelines)
    for words, machine, timeline in zip(cases, machines, timelines, strict=True):
        visit = timeline.compute / ranks
        message = plan.bytes_sent(0) / (ranks - 1) / machine.bandwidth + machine.latency
        step = max(visit, message)
        assert abs((ranks - 1) * step + visit - timeline.seconds) < 0.01 * timeline.seconds
        title = f"{words} ({timeline.seconds * 1e3:.0f} ms, modelled)"
        body.append(text(left, top, title, anchor="start"))
        for rank in range(ranks):
            y = top + 12 + rank * lane
            body.append(text(left - 10, y + 15, f"rank {rank}", 13, "pale", "end"))
            for number in range(ranks):
                x, color = left + number * step * scale, RANK_COLORS[(rank - number) % ranks]
                body.append(box(x, y, visit * scale - 1, 18, color))
                if number < ranks - 1:
                    body.append(box(x, y + 20, message * scale - 1, 7, color))
        top += ranks * lane + 46
    legend = "thick: computing with a block; thin: the message that passes it on"
    body.append(text(left, top - 8, legend, 13, "pale", "start"))
    return svg(
        left + width + 24, top + 6, "Computing and messages of a dense ring of four ranks", body
    )


def _chart(
    draw: Callable[[Any, str], None], title: str, size: tuple[float, float] = (4.8, 4.0)
) -> str:
    """A chart by matplotlib, whose ink and paper follow the reader's colour scheme."""
    import matplotlib.pyplot as plt

    ink, paper = "#010203", "#fdfeff"  # stand-ins, replaced below
    style = {
        **{
            name: ink
            for name in (
                "text.color",
                "axes.labelcolor",
                "axes.edgecolor",
                "xtick.color",
                "ytick.color",
            )
        },
        **{name: paper for name in ("figure.facecolor", "axes.facecolor")},
        **{"svg.fonttype": "none", "svg.hashsalt": title, "legend.frameon": False, "font.size": 9},
        **{"axes.spines.top": False, "axes.spines.right": False, "font.family": "DejaVu Sans"},
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        draw(axes, ink)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
        plt.close(figure)
    drawn = buffer.getvalue().replace(ink, "var(--ink)").replace(paper, "var(--paper)")
    colors = (
        "<style>:root{--ink:#24292f;--paper:#fff}"
        "@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#161b22}}</style>"
    )
    drawn = drawn[drawn.index("<svg") :]
    end = drawn.index(">") + 1
    return drawn[:end] + colors + drawn[end:]


def draw_memory() -> str:
    """Bytes of a rank by category, over the number of ranks."""
    counts = (8, 16, 32, 64, 128)
    plans = [
        ra.make_plan(
            ra.Causal(),
            tokens=1 << 20,
            ranks=ranks,
            layout="zigzag",
            schedule="ring",
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
        )
        for ranks in counts
    ]
    parts = [ra.simulate(plan, "h100_nvlink_ib", backward=True).memory for plan in plans]

    def draw(axes: Any, ink: str) -> None:
        below = [0.0] * len(counts)
        for color, name in zip(RANK_COLORS, parts[0], strict=False):
            gib = [part.get(name, 0) / 2**30 for part in parts]
            axes.bar(range(len(counts)), gib, bottom=below, color=color, label=name, width=0.6)
            below = [a + b for a, b in zip(below, gib, strict=True)]
        axes.set_xticks(range(len(counts)), counts)
        axes.set_xlabel("ranks")
        axes.set_ylabel("GiB of a rank [modelled]")
        axes.figure.legend(labelcolor=ink, loc="outside lower center", ncols=2)

    return _chart(draw, "Memory of a rank by category: a causal backward over 1M tokens")


def draw_crossover() -> str:
    """Time of one forward over the tokens of a rank, a line per schedule."""
    shards = [1 << power for power in range(10, 17)]
    machine = ra.get_machine("h100_nvlink_ib")
    schedules = ("ring", "double_ring(8)", "ulysses(8)", "allgather")

    def seconds(schedule: str, shard: int) -> float:
        plan = ra.make_plan(
            ra.Causal(),
            tokens=32 * shard,
            ranks=32,
            layout="zigzag",
            schedule=schedule,
            heads=32,
            kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
        )
        return ra.simulate(plan, machine).seconds

    lines = {schedule: [seconds(schedule, shard) for shard in shards] for schedule in schedules}

    def draw(axes: Any, ink: str) -> None:
        for number, (schedule, line) in enumerate(lines.items()):
            axes.plot(
                shards,
                [a / b for a, b in zip(line, lines["ring"], strict=True)],
                "o-",
                color=RANK_COLORS[number],
                label=schedule,
                linewidth=5 - number,  # a line below another one shows beside it
                markersize=9 - 1.5 * number,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(shards, [f"{shard // 1024}k" for shard in shards])
        axes.set_xlabel("tokens of a rank (32 ranks, 8 in a node)")
        axes.set_ylabel("time over that of the ring [modelled]")
        axes.set_ylim(bottom=0)
        axes.figure.legend(labelcolor=ink, loc="outside lower center", ncols=2)

    return _chart(
        draw, "Crossover of schedules: time over that of the ring, by the tokens of a rank"
    )


def draw_chunks() -> str:
    """Bytes of all ranks for a chunk after a context, over the tokens of the chunk: by keys and by queries."""
    chunks = [1 << power for power in range(8, 18)]
    models = {"8B, 32 heads, after 128k": (32, 1 << 17), "70B, 64 heads, after 1M": (64, 1 << 20)}

    def gigabytes(heads: int, context: int, chunk: int, rotate: str) -> float:
        own = f"shifted(zigzag, {context})"
        plan = ra.make_plan(
            ra.Causal(),
            tokens=context + chunk,
            ranks=8,
            layout=f"joined(zigzag[{context}], {own}[{chunk}])",
            q_layout=own,
            q_tokens=chunk,
            schedule="ring",
            heads=heads,
            kv_heads=8,
            head_dim=128,
            dtype="bfloat16",
            rotate=rotate,
        )
        return plan.bytes_sent() / 1e9

    def draw(axes: Any, ink: str) -> None:
        for color, (name, sizes) in zip(RANK_COLORS, models.items(), strict=False):
            for rotate, style in (("kv", "o-"), ("q", "s--")):
                sent = [gigabytes(*sizes, chunk, rotate) for chunk in chunks]
                axes.plot(chunks, sent, style, color=color, label=f"{name}: {rotate}", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(
            chunks, [f"{size // 1024}k" if size >= 1024 else str(size) for size in chunks]
        )
        axes.set_xlabel("tokens of the chunk")
        axes.set_ylabel("GB of 8 ranks, one layer [counted]")
        axes.figure.legend(labelcolor=ink, loc="outside lower center")

    return _chart(draw, "Bytes of a chunk after a context: keys travel, or queries do")


def draw_masks() -> Iterator[tuple[str, str]]:
    """Name and drawing of each mask that docs/attention.md shows, from the pattern that is written there."""
    tokens, unit = 64, 2
    side = tokens * unit
    for name, written in re.findall(
        r"_generated/(mask_\w+)\.svg\) \| `(.*?)` \|", (FOLDER / "attention.md").read_text()
    ):
        pattern = ra.parse_pattern(written.replace("\\|", "|"))
        path = []
        for row, seen in enumerate(pattern.mask(tokens)[0] > 0):
            ends = [
                key
                for key in range(tokens + 1)
                if (key > 0 and seen[key - 1]) != (key < tokens and seen[key])
            ]
            for first, last in zip(ends[::2], ends[1::2], strict=True):
                width = (last - first) * unit
                path.append(f"M{4 + first * unit} {4 + row * unit}h{width}v{unit}h-{width}z")
        cell = box(4, 4, side, side)
        body = [cell, f'<path fill="{RANK_COLORS[0]}" d="{"".join(path)}"/>']
        yield (
            name,
            svg(
                side + 8, side + 8, "A mask of 64 tokens: lines are queries, columns are keys", body
            ),
        )


def draw_tree() -> str:
    """The tree of one leaf of keys over the leaves of queries that see it, coloured by the rank that has a node."""
    leaves, ranks, unit, left, high = 8, 3, 66, 90, 50
    plan = ra.make_plan(
        "Causal()", tokens=64 * leaves, ranks=ranks, schedule="direct", reproducible=64
    )
    owner = {leaf: rank for rank in range(ranks) for leaf, _ in plan.leaves.local(rank)}
    nodes = {(0, leaf): {owner[leaf]} for leaf in range(leaves)}
    for level in range(1, 4):
        for i in range(leaves >> level):
            nodes[level, i] = nodes[level - 1, 2 * i] | nodes[level - 1, 2 * i + 1]

    def place(level: int, i: int) -> tuple[float, float]:
        return left + unit * ((2 * i + 1) * 2**level / 2 - 0.5), 260 - high * level

    sent = {
        (level, i)
        for rank in range(1, ranks)
        for leaf, level, i in plan.leaves.nodes(rank, 0).names
        if leaf == 0
    }
    body = [text(24, 28, "dk and dv of leaf 0: nodes of three ranks", 17, anchor="start")]
    for level, i in nodes:
        x, y = place(level, i)
        if level < 3:
            to_x, to_y = place(level + 1, i // 2)
            body.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
    for (level, i), held in nodes.items():
        x, y = place(level, i)
        color = RANK_COLORS[min(held)] if len(held) == 1 else "#57606a"
        ring = ' stroke="#24292f" stroke-width="3"' if (level, i) in sent else ""
        body.append(f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="{color}"{ring}/>')
    for leaf in range(leaves):
        body.append(text(place(0, leaf)[0], 290, f"{leaf}", 13))
    for rank in range(ranks):
        body += [
            box(24 + 130 * rank, 308, 14, 14, RANK_COLORS[rank]),
            text(44 + 130 * rank, 320, f"rank {rank}", 13, anchor="start"),
        ]
    body.append(text(24 + 130 * ranks, 320, "ringed: sent to rank 0", 13, "pale", "start"))
    return svg(660, 340, "The tree over the leaves of queries, for one leaf of keys", body)


def draw_all(folder: Path) -> None:
    """Write the figures that only the site shows."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings = (
        draw_textbook,
        draw_layouts,
        draw_packed,
        draw_tables,
        draw_runs,
        draw_schedules,
        draw_overlap,
        draw_memory,
        draw_crossover,
        draw_chunks,
        draw_tree,
    )
    drawn = {draw.__name__.removeprefix("draw_"): draw() for draw in drawings}
    for name, drawing in {**drawn, **dict(draw_masks())}.items():
        (folder / f"{name}.svg").write_text(drawing)


#: The figures of README, which are stored.
STORED = {FOLDER / "ring.svg": draw_ring_figure, FOLDER / "traffic.svg": draw_traffic}

if __name__ == "__main__":
    for path, draw_stored in STORED.items():
        path.write_text(draw_stored())
