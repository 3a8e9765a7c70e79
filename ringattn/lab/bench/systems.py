"""The systems under their names in the earlier reports, and cases that measure any of them at any length.

Suites choose systems, lengths and settings; this module makes, runs and checks each system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ...layout.regular import Layout
from ...nn import AdaptiveAttention, MultiheadAttention, RingAttention, factories
from ...pattern import Dilated
from ...simulator.numerics.oracle import oracle_rows, places, sampled_rows
from ...text import duration, plural
from .calls import gather, get_layout, make_inputs, make_shards
from .case import HEAD_DIM, HEADS, TOLERANCES, BenchCase, BenchColumn, CaseRecord, Context, Run, make_settings
from .figures import line_name

#: Arguments of multihead modules.
SIZES: dict[str, Any] = {"embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS}
#: Rows that are compared with fp64 softmaxes.
ROWS = 16
#: Default branches of dilated attention.
BRANCHES = {"segment_lengths": (512, 1024, 2048), "dilation_rates": (1, 2, 4)}
#: The keys of a query in the block-sparse systems: as many blocks of 64 tokens around it as the earlier systems used.
LOCAL = {"pattern": "local_window(64, blocks=4)"}
NOTES = (
    f"error: largest difference of {ROWS} rows from softmaxes in fp64 over all their keys, relative to the largest "
    "entry; the rows of a pattern come from its dense mask, which shares nothing with the tiles that are computed",
    "r4, r8, r16: virtual ranks in one process, each with its part of the sequence; blocks of keys travel around the "
    "ring, and the result is that of one device. Ranks without r are processes joined by Gloo",
    "on several ranks a system of one device runs as its ring: 'distributed' in the factory",
)
Module = RingAttention | MultiheadAttention


@dataclass(frozen=True)
class System:
    """A module to benchmark: `make(settings, place)` makes it; `place` has further options for real ranks.

    `settings` are the default settings, which a suite may replace. If `multihead`, the input is [B, N, H * D].
    """

    make: Callable[[dict[str, Any], dict[str, Any]], Module]
    settings: dict[str, Any]
    multihead: bool = False


def _dilated(name: str) -> System:
    single = name.replace("Multihead", "")

    def make(settings: dict[str, Any], place: dict[str, Any]) -> Module:
        ours = "distributed" if place and single in factories.ONE_DEVICE else single
        if single != name:
            return factories.create_multihead_dilated_attention(ours, **SIZES, **_branches(settings), **place)
        ring_size = settings.get("ring_size")
        return factories.create_dilated_attention(ours, **_branches(settings), ring_size=ring_size, **place)

    return System(make, BRANCHES, multihead=single != name)


def _block_sparse(variant: str, settings: dict[str, Any], **options: Any) -> System:
    def make(settings: dict[str, Any], place: dict[str, Any]) -> Module:
        named = {name: settings[name] for name in ("pattern", "block", "density", "k") if name in settings}
        branches = _branches(settings) if "segment_lengths" in settings else {}
        return factories.create_block_sparse_attention(variant, **options, **named, **branches, **place)

    return System(make, settings, multihead=variant == "multihead")


def _branches(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(settings[name]) for name in ("segment_lengths", "dilation_rates")}


#: The systems by their names in the earlier reports. There each name had its own implementation; here all names of
#: a kind make the same module, which one row per name shows.
SYSTEMS: dict[str, System] = {
    **{
        f"{name}DilatedAttention{version}": _dilated(f"{name}DilatedAttention{version}")
        for name, version in (
            *(("", ""), ("Improved", ""), ("Multihead", ""), ("ImprovedMultihead", "")),
            *(("Ring", ""), ("Ring", "V2"), ("Ring", "Production"), ("RingMultihead", "")),
        )
    },
    "BlockSparseRingDilatedAttention": _block_sparse("base", LOCAL),
    "BlockSparseHierarchical": _block_sparse("hierarchical", {"block": 128, "density": 0.1}),
    "BlockSparseAdaptive": _block_sparse("adaptive", {"block": 64, "k": 9}, num_heads=HEADS, head_dim=HEAD_DIM),
    "BlockSparseRingMultiheadDilatedAttention": _block_sparse("multihead", LOCAL, **SIZES),
}


def list_system_cases(
    names: Iterable[str],
    lengths: Sequence[int],
    *,
    ranks: Sequence[int] = (1,),
    dtype: str = "float32",
    until_failure: bool = False,
    settings: dict[str, Any] | None = None,
    label: str | None = None,
) -> list[BenchCase]:
    """A case for each system, number of ranks and length, in this order.

    A name may end in "_r4": 4 virtual ranks. `settings` apply to the systems that have them. With `until_failure` a
    failure is a result, and longer lengths of that system are then not tried. `label`: as for `make_system_case`.
    """
    cases = []
    for name in names:
        taken = SYSTEMS[name.partition("_r")[0]].settings
        own = {key: value for key, value in (settings or {}).items() if key in taken}
        for count in ranks:
            after = None
            for tokens in lengths:
                limits = {"may_fail": until_failure, "after": after}
                cases.append(make_system_case(name, tokens, count, dtype, label=label, settings=own, **limits))
                after = cases[-1].name if until_failure else None
    return cases


#: The cases of a suite of long sequences, each tried until a length fails.
list_long_cases = partial(list_system_cases, dtype="bfloat16", until_failure=True)


def make_system_case(
    name: str,
    tokens: int,
    ranks: int = 1,
    dtype: str = "float32",
    *,
    label: str | None = None,
    settings: dict[str, Any] | None = None,
    **limits: Any,
) -> BenchCase:
    """One case: the forward of a system, without gradients.

    `settings` replace, or are added to, those of the system. `label` is the system's name in the report; `limits` are
    `may_fail` and `after` of the case.
    """
    kind, _, ring_size = name.partition("_r")
    system = SYSTEMS[kind]
    chosen = make_settings(tokens, dtype, system=label or name, kind_of_system=kind)
    chosen |= {"ring_size": int(ring_size)} if ring_size else {}
    chosen |= {**system.settings, **(settings or {})}
    if system.settings is BRANCHES:
        segments, rates = _branches(chosen).values()
        chosen["pattern"] = repr(Dilated(segments, rates, mix="group"))
    chosen["layout"] = "contiguous"
    threads = 2 if ranks == 1 else 1
    return BenchCase(
        f"{label or name}_{tokens}" + (f"_{ranks}_ranks" if ranks > 1 else ""),
        ranks,
        chosen,
        (BenchColumn("forward", threads, _make_forward),),
        check=_check,
        notes=NOTES,
        timeout=600.0,
        weight=4.0 * ranks + tokens / 16384,
        **limits,
    )


def make_system(context: Context) -> tuple[Module, list[torch.Tensor]]:
    """The module of a case, with equal weights on all ranks, and its inputs: (q, k, v), each [B, N, H, D], or (x,)."""
    settings, place = context.settings, {"layout": "contiguous"} if context.ranks > 1 else {}
    system, dtype = SYSTEMS[settings["kind_of_system"]], getattr(torch, settings["dtype"])
    torch.manual_seed(0)
    module = system.make(settings, place).to(dtype).eval()
    tensors = make_inputs(settings, 1 if system.multihead else 3)
    if context.ranks > 1:
        tensors = make_shards(context, tensors)
    tensors = [x.transpose(1, 2) for x in tensors]
    return module, [x.flatten(2) for x in tensors] if system.multihead else tensors


def _make_forward(context: Context) -> Run:
    module, inputs = make_system(context)

    def run() -> tuple[Module, list[torch.Tensor], torch.Tensor]:
        with torch.no_grad():
            result = module(*inputs)
        return module, inputs, result[0] if isinstance(result, tuple) else result

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """The largest relative error of sampled rows; each rank checks the sampled rows in its shard."""
    settings, (module, inputs, out) = context.settings, results["forward"]
    tokens, tolerance = settings["tokens"], TOLERANCES[settings["dtype"]]
    layout, rows = get_layout(context), sampled_rows(tokens, ROWS)
    positions = layout.positions(context.rank)
    with torch.no_grad():
        exact = compute_exact_rows(module, inputs, rows, positions, layout)
    place = places(rows, positions)
    mine = [i for i, row in enumerate(rows) if row in place]
    found = out[:, [place[rows[i]] for i in mine]].flatten(2).double()
    error = (found - exact[:, mine]).abs().max() if mine else torch.zeros((), dtype=torch.float64, device="cpu")
    error = float(_all_reduce(error, True, context.ranks) / exact.abs().max())
    assert error < tolerance, f"{settings['system']} is wrong by {error:.1e}"
    return {"forward": error}


def compute_exact_rows(
    module: Module, inputs: list[torch.Tensor], rows: list[int], positions: np.ndarray, layout: Layout
) -> torch.Tensor:
    """Some rows of the module's output, computed in fp64: [B, len(rows), H * D], on all ranks. Collective."""
    if isinstance(module, MultiheadAttention):
        core: Any = module.core
        q, k, v = module._project(*inputs * 3)
    else:
        core = module
        q, k, v = (x.transpose(1, 2) for x in inputs)
    if isinstance(core, AdaptiveAttention):
        whole = [gather(x, layout) if layout.ranks > 1 else x for x in (q, k, v)]
        exact = _exact_adaptive_rows(core, rows, *whole)
    else:
        pattern = core.pattern.bind(HEADS, layout.tokens)
        reduce: Any = partial(_all_reduce, ranks=layout.ranks)
        exact = (
            oracle_rows(pattern, layout.tokens, rows, HEAD_DIM**-0.5, positions, q, k, v, reduce) * pattern.output_scale
        )
    exact = exact.transpose(1, 2).flatten(2)
    if isinstance(module, MultiheadAttention):
        norm: Any = module.norm
        exact = exact if norm is None else deepcopy(norm).double()(exact)
        exact = deepcopy(module.out_proj).double()(exact)
    return exact


def _exact_adaptive_rows(
    module: AdaptiveAttention, rows: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Rows `rows` of the output in fp64, over the blocks that the module selected, with the block scores as a bias."""
    assert module.blocks is not None and len(q) == 1
    block, blocks = module.block, torch.tensor(module.blocks, device="cpu")
    means = [
        torch.stack([part.mean(2) for part in x.double().split(block, 2)], 2) @ weight.double()
        for x, weight in ((q, module.query), (k, module.key))
    ]
    scores = (means[0] @ means[1].mT)[0] / module.rank**0.5
    at = torch.tensor(rows, device="cpu") // block
    of_key = torch.arange(k.shape[2], device="cpu") // block
    bias = scores[:, at][:, :, of_key].masked_fill(~blocks[:, at][:, :, of_key], -torch.inf)
    return scaled_dot_product_attention(q[:, :, rows].double(), k.double(), v.double(), attn_mask=bias[None])


def _all_reduce(x: torch.Tensor, most: bool, ranks: int) -> torch.Tensor:
    """x, reduced in place over the ranks: the maximum if `most`, otherwise the sum."""
    if ranks > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX if most else dist.ReduceOp.SUM)
    return x


def find_cases(records: list[CaseRecord], system: str) -> list[CaseRecord]:
    """The records with measured numbers whose system has a name that begins with `system`."""
    return [x for x in records if str(x["settings"].get("system", "")).startswith(system) and x.get("columns")]


def conclude_systems(records: list[CaseRecord]) -> tuple[str, None]:
    """How many rows are right, and the fastest system at the most tokens; there is no target."""
    done = find_cases(records, "")
    if not done:
        return f"none of {plural(len(records), 'row')} was computed", None
    worst, most = max(max(x["errors"].values()) for x in done), max(x["settings"]["tokens"] for x in done)
    longest = [x for x in done if x["settings"]["tokens"] == most]
    best = min(longest, key=lambda x: x["columns"]["forward"]["median"])
    return (
        f"{len(done)} of {len(records)} rows agree with fp64 softmaxes, the largest error is {worst:.1e}; the fastest "
        f"at {most:,} tokens is {line_name(best)}, {duration(best['columns']['forward']['median'])}"
    ), None
