"""Suites "gpu" and "gpu_quick": our attention on CUDA against a matrix product, cuDNN, flash and FlexAttention.

Column "ringattn" is kernel "auto"; "visit" and "aten_cuda" are the two between which it chooses. Run on one H200 before
there was kernel "visit".
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch

from ....call.functional import attention, virtual_attention
from ....call.planner import make_plan
from ....errors import Unsupported
from ....kernels import get_kernel
from ....kernels.contract import CallData, KernelPass
from ....pattern import Pattern
from ....plan.steps import Part
from ....plan.visit import Visit
from ....plan.work import Work
from ....simulator.numerics.oracle import oracle_rows_alone, sampled_rows
from ....text import size
from ..calls import BACKWARD_WORK, make_backward, make_pass, relative_error
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio
from ..libraries import CANNOT_RUN, LIBRARIES, Attend, list_masks, make_call, say_what_lacks
from ..runner import take_turns

#: The type of the device. Tests set "cpu" and replace torch.cuda by stand-ins.
DEVICE = "cuda"
DTYPE = torch.bfloat16
#: Largest allowed error of outputs, relative to fp64 rows, and of gradients, relative to ours.
TOLERANCE, GRAD_TOLERANCE = 2e-2, 5e-2
#: Our kernels, timed by name besides "auto".
KERNELS = ("visit", "aten_cuda")
#: Columns that need kernel "visit" alone: one of two equal visits, see `make_visit`.
VISITS = {"first visit": False, "merging visit": True}
#: For some cases the ratio of two columns' times that is wanted, at least. That of dilated is 0.25 ms on an H200.
TARGETS = {
    **{f"{name}_forward": ("cuDNN", "ringattn", 1 / 1.03) for name in ("dense", "causal")},
    **{f"window_{direction}": ("FlexAttention", "ringattn", 1 / 1.1) for direction in ("forward", "backward")},
    **{
        f"{name}_{direction}": ("FlexAttention", "ringattn", 1 / 1.05)
        for name in ("documents", "block_sparse")
        for direction in ("forward", "backward")
    },
    "dilated_forward": ("FlexAttention", "ringattn", 7.7),
    "merge_forward": ("first visit", "merging visit", 1 / 1.25),
    "ring_causal_forward": ("ringattn", "virtual ring of 8", 1 / 2.2),
}
#: Maximum number of calls between two events.
MOST_CALLS = 20
NOTE = (
    "bf16, batch 1; CUDA events around the calls of a run, all columns in turns; matmul: a square product of the same "
    "dtype; matmul / ringattn x work: our share of matmul's rate; peak: bytes that a call allocates; backward: the "
    "backward alone, on a retained graph, with 2.5 times the work of its forward"
)

Tensor = torch.Tensor
Raw = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases."""

    heads: int = 16
    head_dim: int = 128
    tokens: int = 16384
    window: int = 1023
    block: int = 128
    dilated: tuple[int, int] = (4096, 4)
    matmul: int = 8192
    #: Minimum seconds between two events.
    enough: float = 0.05


def list_cases(sizes: Sizes) -> list[BenchCase]:
    """The cases of this suite: computing rates for several masks, and rings of virtual ranks."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    settings = {"device": device, **vars(sizes)}
    cases, masks = [], list_masks(sizes.tokens, sizes.window, sizes.block, *sizes.dilated)
    for backward, direction in ((False, "forward"), (True, "backward")):
        for name, mask in masks.items():
            options: Any = {"mask": mask, "tokens": sizes.tokens, "heads": sizes.heads, "device": DEVICE}
            others = {library: partial(make_call, library, **options) for library in LIBRARIES}
            others |= _make_kernels(mask.pattern)
            cases.append(_make_rate_case(f"{name}_{direction}", settings, sizes, mask.pattern, others, backward))
        for name, layout in (("dense", "contiguous"), ("causal", "zigzag")):
            pattern = masks[name].pattern
            ring = partial(virtual_attention, pattern=pattern, ranks=8, layout=layout, schedule="ring")
            others = {"virtual ring of 8": partial(lambda attend: attend, ring), **_make_kernels(pattern)}
            cases.append(_make_rate_case(f"ring_{name}_{direction}", settings, sizes, pattern, others, backward))
    others = {name: partial(make_visit, sizes, second) for name, second in VISITS.items()}
    cases.append(_make_rate_case("merge_forward", settings, sizes, masks["window"].pattern, others, False))
    return cases


def _make_kernels(pattern: Pattern) -> dict[str, Any]:
    return {name: partial(partial, attention, pattern=pattern, kernel=name) for name in KERNELS}


def make_visit(sizes: Sizes, second: bool) -> Attend:
    """A function that computes one visit of kernel "visit" with a causal window: the first one, or an equal second one.

    The second merges into the output of the first. Each pair then counts twice, which leaves the output as it is.
    """
    heads, tokens = range(sizes.heads), range(sizes.tokens)
    work = Work(heads, heads, tokens, (tokens,), 0, sizes.window)
    visits = [Visit(Part("kv", i), [work], (len(heads), len(tokens)), first=True) for i in range(2)]

    @cache
    def begin(q: Tensor, k: Tensor, v: Tensor) -> tuple[KernelPass, Visit, Any]:
        kernel = get_kernel("visit", q, k, v)
        tables, count = kernel.prepare(visits, len(heads), len(heads), len(tokens), backward=False)
        call = CallData(q.shape[-1] ** -0.5, Part("q", 0), heads, lambda part: (q, q), prepared=count)
        one, both = kernel.begin(call, q, (k, v)), [replace(x, table=y) for x, y in zip(visits, tables, strict=True)]
        sums = one.new_sums(None)
        for visit in both:
            one.visit_forward(visit, q, (k, v), sums)
        return one, both[second], sums

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one, visit, sums = begin(q, k, v)
        one.visit_forward(visit, q, (k, v), sums)
        return one.finish(sums)[0]

    return attend


def _make_rate_case(
    name: str, settings: Raw, sizes: Sizes, pattern: Pattern, others: dict[str, Any], backward: bool
) -> BenchCase:
    """A case with our call of a pattern, the calls that `others` make, and a matrix product."""
    pairs = make_plan(pattern, tokens=sizes.tokens, ranks=1, heads=sizes.heads).pairs()
    flops, product = 4.0 * sizes.head_dim * pairs * (BACKWARD_WORK if backward else 1.0), 2.0 * sizes.matmul**3
    makers: dict[str, Any] = {"ringattn": lambda: partial(attention, pattern=pattern), **others}
    ratios: dict[tuple[str, str], float | None] = {(other, "ringattn"): None for other in others}
    if name in TARGETS:
        *pair, target = TARGETS[name]
        ratios[pair[0], pair[1]] = target
    return BenchCase(
        name,
        1,
        {**settings, "flops": {"matmul": product, **dict.fromkeys(makers, flops)}},
        tuple(BenchColumn(column, 1, lambda context: None) for column in ("matmul", *makers)),
        (Ratio("matmul", "ringattn", work=flops / product), *(Ratio(*pair, target) for pair, target in ratios.items())),
        notes=(NOTE,),
        summarise=list_rows,
        measure=partial(measure_columns, sizes, pattern, makers, backward),
    )


def measure_columns(
    sizes: Sizes, pattern: Pattern, makers: dict[str, Any], backward: bool, context: Context, repeat: int
) -> Raw:
    """For columns that can run here: seconds, errors and peak; for the others, why they are not timed.

    A library that is wrong is not timed. Gradients are compared with ours; if some differ, others must agree with ours.
    """
    source = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device=DEVICE).to(DTYPE)

    q, k, v, grad = (draw(1, sizes.heads, sizes.tokens, sizes.head_dim) for _ in range(4))
    a, b = (draw(sizes.matmul, sizes.matmul) for _ in range(2))
    runs: dict[str, Callable[[], Any]] = {"matmul": lambda: a @ b}
    results, missing, rows = {}, {}, sampled_rows(sizes.tokens, 8)
    for column, make in makers.items():
        try:
            run = make_backward(make(), (q, k, v), grad) if backward else make_pass(make(), (q, k, v), None)
            results[column] = [x[:, :, slice(None) if backward else rows].cpu() for x in run()]
            runs[column] = run
        except CANNOT_RUN as error:
            if column not in (*LIBRARIES, *KERNELS, *VISITS):
                raise
            missing[column] = say_what_lacks(error)
    exact = results["ringattn"] if backward else [oracle_rows_alone(pattern, rows, q.cpu(), k.cpu(), v.cpu())]
    errors = {column: max(map(relative_error, found, exact)) for column, found in results.items()}
    limit = GRAD_TOLERANCE if backward else TOLERANCE
    wrong = {column for column, found in errors.items() if not found < limit}
    agree = not wrong or not backward or {*LIBRARIES} & errors.keys() - wrong
    assert agree and wrong <= {*LIBRARIES}, f"results differ by more than {limit}: {errors}"
    for column in wrong:
        del runs[column]
        missing[column] = f"not timed, because it is wrong by {errors[column]:.1e}"
    calls = {column: min(MOST_CALLS, 1 + int(sizes.enough / max(_time(run, 1), 1e-9))) for column, run in runs.items()}
    times = take_turns({column: partial(_time, run, calls[column]) for column, run in runs.items()}, repeat)
    peaks = {column: _peak(run) for column, run in runs.items()}
    details = {"hardware": describe_device(), "missing": missing, "peaks": peaks, "calls": calls}
    return {"times": times, "errors": errors, "details": details}


def _time(run: Callable[[], Any], calls: int) -> float:
    """Seconds per call on the device; the host waits only at the end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _peak(run: Callable[[], Any]) -> int:
    """Peak bytes allocated during a call, beyond those allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def describe_device() -> dict[str, Any]:
    """The name of the device, and the versions of its driver and libraries."""
    tool = shutil.which("nvidia-smi")
    query = [tool or "", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split() if tool else []
    versions = {"driver": driver[0] if driver else None, "cuda": torch.version.cuda, "torch": str(torch.__version__)}
    versions["cudnn"] = torch.backends.cudnn.version()
    device = torch.cuda.get_device_properties()
    return {"device": f"{device.name} (sm_{device.major}{device.minor}, {size(device.total_memory)})", **versions}


def list_rows(record: CaseRecord) -> list[dict[str, str]]:
    """A row for each column, including those that cannot run here."""
    details, flops = record["details"], record["settings"]["flops"]
    rates = {name: flops[name] / timed["median"] for name, timed in record["columns"].items()}
    rows = [
        {
            "what": name,
            "ms": f"{timed['median'] * 1e3:.4g}",
            "TFLOP/s": f"{rates[name] / 1e12:.4g}",
            "of matmul": f"{rates[name] / rates['matmul']:.1%}",
            "peak": size(details["peaks"][name]),
            "remark": f"{timed['min'] * 1e3:.4g} .. {timed['max'] * 1e3:.4g} ms, {details['calls'][name]} calls a run",
        }
        for name, timed in record["columns"].items()
    ]
    empty = dict.fromkeys(rows[0], "")
    return rows + [{**empty, "what": name, "remark": reason} for name, reason in details["missing"].items()]


def conclude(records: list[CaseRecord]) -> tuple[str, bool]:
    """A sentence with the number of measured cases, the hardware and the median rate, and whether all cases succeeded.

    The rate is relative to that of a matrix product.
    """
    done = [record for record in records if "failed" not in record]
    hardware = done[0]["details"]["hardware"] if done else {}
    shares = [record["ratios"][0]["median"] for record in done if record["ratios"]]
    text = f"{len(done)} of {len(records)} cases measured; {', '.join(f'{x} {y}' for x, y in hardware.items())}"
    text += f"; median share of matmul's rate {median(shares):.1%}" if shares else ""
    return text, len(done) == len(records)


def check() -> None:
    """Raise Unsupported without a CUDA device."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise Unsupported("suite=gpu: this process sees no CUDA device (ringattn doctor says why); try suite=ring")


SUITE = BenchSuite(partial(list_cases, Sizes()), conclude, check)
#: Small sizes, to show within a minute that all cases run; the rates mean nothing.
SMALL = Sizes(
    heads=2, head_dim=16, tokens=128, window=40, block=16, dilated=(64, 4), matmul=64, enough=0.0
)  # fmt: skip
QUICK = BenchSuite(partial(list_cases, SMALL), conclude, check)
