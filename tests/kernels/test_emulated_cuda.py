"""The CUDA kernel on emulated ops: every choice gives the numbers of dense attention, and no op is handed what it
refuses."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate
from oracle import Case, Result, dense, error, errors, make_case, solve_calls, stored, trimmed, visible

import ringattn as ra
from ringattn.kernels import aten_cuda, get_kernel
from ringattn.kernels.aten_cuda import AtenCuda
from ringattn.kernels.base import cut
from ringattn.kernels.cuda_device import KNOWN_CUDNN, WHOLE_TILES_CUDNN, CudaDevice, efficient_reads, flash_reads
from ringattn.nn.adaptive import SelectedBlocks
from ringattn.plan.work import Work

#: Where a pattern depends on the number of tokens, it is made for that number.
DOCUMENTS = ("documents", "causal-documents", "hidden-rows", "empty-rows")
PATTERNS = {
    "full": "Full()",
    "causal": "Causal()",
    "window": "Causal() & Window(7)",
    "narrow": "Causal() & Window(1)",
    "two-sided": "Window(7, 4)",
    "sinks": "Causal() & (Sinks(3) | Window(6))",
    "strided": "Causal() & (Strided(3) | Window(2))",
    "mix": "mix(Causal(), Window(5, 5), Strided(4))",
    "longnet": "Dilated((8, 24, 64), (1, 2, 5))",
    "longnet-causal": "Dilated((7, 30), (2, 3), causal=True)",
    "dilated-groups": "Dilated((16, 32), (1, 3), causal=True, mix='group')",
    "dilated-union": "Dilated((16, 32), (1, 2), causal=True, mix='union') | Sinks(2)",
    "local-blocks": "Causal() & local_window(4, 2)",
    "global-blocks": "global_local(5, globals=1, blocks=1)",
    "dilated-blocks": "dilated_blocks(4, (1, 2, 4))",
    "block-union": "Causal() & (strided_blocks(3, stride=3) | Window(4))",
}


VALUES: dict[str, tuple[Any, ...]] = {
    "pattern": (*PATTERNS, *DOCUMENTS),
    "kernel": ("aten_cuda", "aten_cuda:flash", "aten_cuda:cudnn", "aten_cuda:efficient"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((40, 40), (64, 64), (80, 80), (128, 128), (256, 256), (40, 64), (64, 24), (20, 36), (128, 80), (200, 200)),
    "heads": ((2, 2), (4, 2), (3, 1), (4, 4)),
    "batch": (1, 1, 2),
    "tokens": (15, 22, 29),
    "ranks": (2, 2, 3, 4),
    "layout": ("contiguous", "zigzag", "striped", "striped(4)", "balanced(5)"),
    "schedule": ("ring", "direct", "allgather", "ulysses(2)", "double_ring(2)"),
    "rotate": ("kv", "q", "q, kv", "q, q"),
    "return_lse": (True, False),
    "cotangent": ("contiguous", "transposed", "expanded"),
    "inputs": ("contiguous", "heads last", "odd offset"),
    "capability": ((9, 0), (8, 0), (8, 6), (7, 5), (10, 0), (12, 0)),
}


#: One configuration of a virtual ring; the names say what varies.
RingCase = namedtuple("RingCase", VALUES)  # type: ignore[misc]


def is_allowed(case: RingCase) -> bool:
    """Whether the call is one that a CUDA machine computes."""
    flash = case.kernel.endswith(("flash", "cudnn"))
    old = case.capability < (8, 0) and (flash or case.dtype == torch.bfloat16)
    no_room = case.return_lse and max(case.dims) > 248
    teams = "(2)" in case.schedule and (case.ranks % 2 or (case.schedule == "ulysses(2)" and case.heads[1] % 2))
    return not old and not no_room and not teams


def random_case(source: Random) -> RingCase:
    """A random configuration that a CUDA machine computes."""
    while True:
        case = RingCase(*map(source.choice, VALUES.values()))
        if is_allowed(case):
            return case


def covering_cases(seed: int, most: int) -> Iterator[RingCase]:
    """`most` configurations in which nearly all pairs of values of two fields occur, as `uncovered` tells."""
    source, seen = Random(seed), set[object]()
    for _ in range(most):
        best = max((random_case(source) for _ in range(60)), key=lambda case: len(pairs(case) - seen))
        seen |= pairs(best)
        yield best


def pairs(case: RingCase) -> set[object]:
    """The pairs of values that a configuration holds, with their fields."""
    return set(combinations(case._asdict().items(), 2))


def make_pattern(name: str, tokens: int) -> ra.Pattern:
    half, third = tokens // 2, tokens // 3
    texts = {
        "documents": f"Documents([{half}, 1, {tokens - half - 1}])",
        "causal-documents": f"Causal() & Documents([{third}, {third}, {tokens - 2 * third}])",
        "hidden-rows": f"Strided(2) & Window(9, 0) & Documents([{third}, {tokens - third}]) & (Sinks({half}) | Full())",
        "empty-rows": f"Sinks(4) & Documents([{half}, {tokens - half}])",
    }
    return ra.parse_pattern(PATTERNS[name] if name in PATTERNS else texts[name])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The numbers of x [B, H, N, D] in another layout; "expanded" repeats the first column of x."""
    if layout in ("transposed", "heads last"):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "columns apart":
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[..., :1].expand(x.shape)
    if layout == "odd offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


def ratio_of(case: RingCase, seed: int = 0) -> float:
    """The largest error of out, dq, dk, dv and lse, as a multiple of what one call on one device may err.

    Raises what the ops or the ring refuse.
    """
    with pytest.MonkeyPatch.context() as patch:
        return _ratio(case, emulate(patch, CudaDevice(case.capability, WHOLE_TILES_CUDNN), any_dtype=True), seed)


def _ratio(case: RingCase, ops: EmulatedOps, seed: int) -> float:
    made = make_case(
        *(case.tokens, *case.heads, case.dtype),
        batch=case.batch,
        dim=case.dims[0],
        value_dim=case.dims[1],
        lse=case.return_lse,
        seed=seed,
    )
    grad = laid_out(made.grad, case.cotangent)
    made = Case(*made.inputs, grad, made.grad_lse)
    pattern = make_pattern(case.pattern, case.tokens)
    mask = torch.from_numpy(pattern.mask(case.tokens, case.heads[0]))
    oracle = dense(made, mask, pattern.output_scale)
    # What any single call must err that stores its results in this dtype; lucky calls err less than a rounding.
    rounding = torch.finfo(case.dtype).eps / 4
    allowed = [max(x, rounding) + 1e-6 for x in errors(stored(made, mask, pattern.output_scale), oracle)]
    q, k, v = (laid_out(x, case.inputs).detach().requires_grad_() for x in made.inputs)
    result = ra.virtual_attention(
        *(q, k, v, pattern),
        ranks=case.ranks,
        layout=case.layout,
        schedule=case.schedule,
        kernel=case.kernel,
        rotate=case.rotate,
        return_lse=case.return_lse,
    )
    if case.return_lse:
        out, lse = result
        seen = oracle.lse > -torch.inf
        assert torch.equal(lse > -torch.inf, seen), "rows that see no key have lse -inf"
        cotangent = (made.grad_lse * seen).to(lse.dtype)
        grads = torch.autograd.grad((out, lse), (q, k, v), (grad, cotangent))
        lse_error = float((lse.detach()[seen].double() - oracle.lse[seen]).abs().max())
    else:
        out, lse_error = result, 0.0
        grads = torch.autograd.grad(out, (q, k, v), grad)
    assert ops.calls, "the ring ran on emulated ops"
    found = errors(Result(out, oracle.lse, grads), oracle)
    return max(lse_error / 2e-5, *(e / a for e, a in zip(found, allowed, strict=True)))


SHAPES = [(1, 9), (9, 1), (13, 7), (16, 16), (40, 24), (31, 64)]
BANDS = [
    (None, None),
    (0, None),
    (-3, None),
    (5, None),
    (None, 0),
    (None, 7),
    (-5, 9),
    (0, 6),
    (-1, 30),
    (2, 12),
    (-9, -2),
]

SQUARE = Work(range(8), range(8), range(512), (range(512),))
BAND = replace(SQUARE, lo=0, hi=99)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """Emulated ops of an H100, which take fp32 everywhere, so that small errors show."""
    return emulate(monkeypatch, any_dtype=True)


def all_works() -> list[Work]:
    return [work for rows, keys in SHAPES for lo, hi in BANDS if (work := trimmed(rows, keys, lo, hi)) is not None]


@pytest.mark.parametrize("reads", [flash_reads, efficient_reads])
def test_cuts_hold_the_pairs_of_the_work(reads: Callable[[Work], bool]) -> None:
    several = 0
    for work in all_works():
        calls = list(cut(work, reads))
        several += len(calls) > 1
        found = torch.zeros(len(work.q), work.keys, dtype=torch.int64)
        for call in calls:
            assert reads(call)
            (keys,) = call.k
            found[call.q.start - work.q.start : call.q.stop - work.q.start, keys.start - work.k[0].start :][
                :, : len(keys)
            ] += visible(call)
        assert torch.equal(found, visible(work).long()), work
        assert len(calls) <= 3
    assert several > 3, "some bands are misread as one call"


CHOICES = [None, "flash", "cudnn", "efficient"]
LAID_OUT = [
    (torch.float32, "contiguous"),
    (torch.float32, "heads last"),
    (torch.float32, "columns apart"),
    (torch.float32, "odd offset"),
    (torch.bfloat16, "odd offset"),
    (torch.float16, "contiguous"),
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("dtype", "lay_out"), LAID_OUT)
def test_every_choice_gives_dense_attention(
    ops: EmulatedOps, choice: str | None, dtype: torch.dtype, lay_out: str
) -> None:
    """Forward and backward, grouped heads, value dims of their own; fp32 shows errors that 16 bits would hide."""
    kernel = AtenCuda(choice, dtype, deterministic=False)
    source = torch.Generator().manual_seed(5)

    def make(heads: int, rows: int, width: int) -> torch.Tensor:
        return laid_out(torch.randn(2, heads, rows, width, generator=source).to(dtype), lay_out)

    # Each choice meets each work in two layouts or dtypes, and each layout and dtype meets each work.
    place = CHOICES.index(choice) + LAID_OUT.index((dtype, lay_out))
    for work in all_works()[place % 3 :: 3]:
        q, grad = make(4, len(work.q), 16), make(4, len(work.q), 24)
        k, v = make(2, work.keys, 16), make(2, work.keys, 24)
        case = Case(q, k, v, grad, scale=0.3)
        found, truth = solve_calls(kernel, case, work), dense(case, visible(work))
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        assert max(errors(found, truth)) <= limit and error(found.lse, truth.lse) <= limit, work
    assert ops.calls


def test_emulated_flash_misreads_windows(ops: EmulatedOps) -> None:
    """The emulation can fail: a band that is handed over unsplit gives wrong numbers."""
    wrong = 0
    for work in (work for work in all_works() if not work.dense and not flash_reads(work)):
        q, k = torch.ones(1, 1, len(work.q), 8), torch.ones(1, 1, work.keys, 8)
        v = torch.eye(work.keys, max(8, -(-work.keys // 8) * 8))[None, None]
        single = Work(range(1), range(1), work.q, work.k, work.lo, work.hi)
        out, _ = AtenCuda("flash", torch.float32, deterministic=False).forward(q, k, v, single, 1.0)
        wrong += not torch.equal(out[0, 0, :, : work.keys] > 0, visible(work))
    assert wrong > 3


@cache
def matrix() -> list[RingCase]:
    """The rings that are compared, which take seconds to choose."""
    return list(covering_cases(seed=1, most=304))


CHUNKS = 12


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_virtual_rings(chunk: int) -> None:
    """No wrong number, no refusal and no second layout under a key of cuDNN in rings of all kinds.

    An error of 5 times what storing results in their dtype costs is a wrong number. Every visit rounds its results, and
    a ring has up to 4 visits.
    """
    for number, case in list(enumerate(matrix()))[chunk::CHUNKS]:
        assert ratio_of(case, seed=number) <= 5, case


def test_the_matrix_covers_pairs() -> None:
    """Each value of a field meets nearly every value of each other field."""
    source = Random(0)
    possible = set[object]().union(*(pairs(random_case(source)) for _ in range(4000)))
    met = set[object]().union(*map(pairs, matrix()))
    assert len(possible - met) <= 0.01 * len(possible)


@pytest.fixture
def determinism() -> Iterator[None]:
    """torch's deterministic mode may change in the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, True), (True, False)])
def test_the_mode_of_the_caller_stays_as_it_is(determinism: None, enabled: bool, warn_only: bool) -> None:
    """Deterministic mode of torch is the caller's, warn_only included."""
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    for wanted in (False, True):
        with aten_cuda._deterministic(wanted):
            assert torch.are_deterministic_algorithms_enabled() == (enabled or wanted)
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only


def test_head_dims_without_room_for_the_gradient_of_lse_are_refused(ops: EmulatedOps) -> None:
    """Before the first message: else the op would refuse 264 columns in the middle of a backward."""
    q = torch.randn(1, 1, 16, 250, dtype=torch.float16)
    options = {"ranks": 2, "kernel": "aten_cuda:flash", "return_lse": True}
    ra.virtual_attention(q, q, q, "Causal()", **options)
    with pytest.raises(ra.Unsupported, match=r"250 with return_lse and gradients.*256 at most"):
        ra.virtual_attention(q.requires_grad_(), q, q, "Causal()", **options)
    ra.virtual_attention(q, q, q, "Causal()", **{**options, "return_lse": False}).sum().backward()
    narrow = torch.randn(1, 1, 16, 248, dtype=torch.float16, requires_grad=True)
    out, lse = ra.virtual_attention(narrow, narrow, narrow, "Causal()", **options)
    (out.sum() + lse.sum()).backward()


def taken(
    capability: tuple[int, int] = (9, 0),
    dtype: torch.dtype = torch.bfloat16,
    *,
    choice: str | None = None,
    work: Work = SQUARE,
    dim: int = 128,
    **facts: Any,
) -> str:
    """The op that computes a work, or what the kernel says when it refuses."""
    kernel = AtenCuda(choice, dtype, deterministic=False)
    try:
        kernel.use(CudaDevice(capability, **facts), dim)
    except ra.Unsupported as error:
        return str(error)
    return " ".join(dict(kernel.explain(work, head_dim=dim).calls))


def test_the_op_is_one_that_the_device_runs() -> None:
    fp16, fp32 = torch.float16, torch.float32
    assert taken() == "cudnn" and taken((10, 0)) == "cudnn"
    assert taken((8, 0)) == taken((8, 9)) == taken((12, 0)) == "flash"
    assert taken((7, 5), fp16) == taken((7, 0), fp16) == taken(dtype=fp32) == "efficient"
    assert "no op of PyTorch computes windows" in taken((7, 5)) and "compute capability 8.0 for bfloat16" in taken(
        (7, 5)
    )
    assert "needs compute capability 8.0" in taken((7, 5), fp16, choice="flash")
    assert "computes float16 and bfloat16, not float32" in taken(dtype=fp32, choice="cudnn")
    assert taken((8, 0), choice="cudnn") == "cudnn" and taken(choice="efficient") == "efficient"


def test_cudnn_needs_a_known_version_and_whole_calls() -> None:
    few, odd, grouped = replace(SQUARE, q=range(127)), replace(SQUARE, k=(range(500),)), replace(SQUARE, kv=range(2))
    assert taken(work=few) == "flash" and taken(work=few, choice="cudnn") == "flash"
    assert taken(cudnn=None) == taken(cudnn=KNOWN_CUDNN - 1) == "flash"
    assert "torch.backends.cudnn.version() is None" in taken(cudnn=None, choice="cudnn")
    assert taken(work=odd) == "flash" and taken(work=odd, cudnn=WHOLE_TILES_CUDNN) == "cudnn"
    assert taken(dim=136) == "flash"
    assert taken(work=grouped) == "cudnn", "query heads that share keys go to cuDNN"
    assert taken((10, 0), work=grouped) == "flash", "cuDNN is wrong with few key/value heads there"
    assert taken(work=replace(SQUARE, lo=0)) == "cudnn"
    assert taken(work=replace(SQUARE, lo=0, hi=99), choice="cudnn") == "flash"


def test_shapes_that_do_not_come_again_are_for_flash(ops: EmulatedOps) -> None:
    """cuDNN builds a plan for each shape and stride: fresh documents would have it build plans in every step."""
    q = torch.randn(1, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)

    def ops_of(pattern: ra.Pattern | str, kernel: str, ranks: int) -> set[str]:
        ops.calls.clear()
        ra.virtual_attention(q, q, q, pattern, ranks=ranks, kernel=kernel).sum().backward()
        return set(ops.calls)

    by_flash, by_cudnn = {"flash", "flash backward"}, {"cudnn", "cudnn backward"}
    chosen = SelectedBlocks(16, torch.eye(4, dtype=torch.bool).tolist())
    for ranks in (1, 2):
        assert ops_of("Full()", "aten_cuda", ranks) == ops_of("Causal()", "aten_cuda", ranks) == by_cudnn
        for varied in (
            "Documents([40, 24])",
            "Causal() & Documents([40, 24])",
            "mix(Causal(), Documents([64]))",
            chosen,
        ):
            assert ops_of(varied, "aten_cuda", ranks) == by_flash, varied
        assert ops_of("Documents([40, 24])", "aten_cuda:cudnn", ranks) == by_cudnn, "who names an op gets it"


def test_an_activated_flash_is_used() -> None:
    assert taken(flash="FA3") == "flash" and taken((10, 0), flash="FA4") == "flash"
    assert taken((10, 0), flash="FA3") == "cudnn", "FA3 does not run there"
    assert "FA3 is activated, and does not run on 8.0" in taken((8, 0), flash="FA3", choice="flash")
    assert taken((8, 0), flash="FA3", work=BAND) == taken((9, 0), flash="FA4", dim=192) == "efficient"
    kernel = AtenCuda(None, torch.bfloat16, deterministic=False)
    kernel.use(CudaDevice((9, 0), flash="FA4"), 128)
    assert kernel.max_head_dim == 128, "the gradient of lse has no room"


def test_the_switches_of_torch_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: WHOLE_TILES_CUDNN)
    flags = torch.backends.cuda
    before = flags.flash_sdp_enabled(), flags.cudnn_sdp_enabled(), flags.mem_efficient_sdp_enabled()

    def run(flash: bool, cudnn: bool, efficient: bool, choice: str | None = None) -> str:
        for enable, on in zip(
            (flags.enable_flash_sdp, flags.enable_cudnn_sdp, flags.enable_mem_efficient_sdp),
            (flash, cudnn, efficient),
            strict=True,
        ):
            enable(on)
        read = CudaDevice.read(torch.device("cpu"))
        return taken(read.capability, choice=choice, cudnn=read.cudnn, disabled=read.disabled, work=BAND)

    try:
        assert run(True, True, True) == "flash"
        with monkeypatch.context() as rocm:
            rocm.setattr(torch.version, "hip", "7.0")  # the version is that of MIOpen
            assert CudaDevice.read(torch.device("cpu")).cudnn is None
        assert run(False, True, True) == run(False, True, True, "cudnn") == "efficient"
        assert run(True, False, False) == "flash"
        assert "no op of PyTorch computes windows here" in run(False, True, False)
        for choice, name in (("flash", "flash"), ("cudnn", "cudnn"), ("efficient", "mem_efficient")):
            assert f"enable_{name}_sdp(False) has switched it off" in run(False, False, False, choice)
    finally:
        flags.enable_flash_sdp(before[0])
        flags.enable_cudnn_sdp(before[1])
        flags.enable_mem_efficient_sdp(before[2])


def test_kernels_that_cut_in_another_way_have_another_name() -> None:
    """Plans keep the calls of a kernel by its name."""
    names = set()
    for disabled in (frozenset[str](), frozenset({"flash"})):
        for choice in (None, "cudnn"):
            kernel = AtenCuda(choice, torch.float16, deterministic=False)
            kernel.use(CudaDevice((9, 0), disabled=disabled), 64)
            names.add(kernel.name)
    assert len(names) == 4


def test_determinism_of_torch_as_a_whole_is_honoured(determinism: None) -> None:
    torch.use_deterministic_algorithms(True)
    assert taken() == "flash" and "not deterministic" in taken(choice="cudnn")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert taken() == "cudnn"


def test_one_layout_of_gradients_for_a_plan_of_cudnn(ops: EmulatedOps) -> None:
    """The emulated op refuses a second layout of dO and out under one key; the kernel hands it one."""
    q, k, v, out, grad = (torch.randn(1, 2, 16, 8) for _ in range(5))
    work = Work(range(2), range(2), range(16), (range(16),))
    kernel, lse = AtenCuda("cudnn", torch.float16, deterministic=False), torch.zeros(1, 2, 16)
    layouts = (grad, grad.transpose(1, 2).contiguous().transpose(1, 2), grad[..., :1].expand(grad.shape))
    for x in layouts:
        for y in layouts:
            kernel.backward(x, q, k, v, y, lse, work, 1.0)
    assert ops.calls == {"cudnn backward": 9} and len(ops.plans) == 1
    with pytest.raises(RuntimeError, match="a plan of cuDNN"):
        ops._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, lse.unsqueeze(-1)), *([None] * 6), False, scale=1.0
        )


def test_columns_that_flash_cannot_differentiate_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, CudaDevice((8, 9)))
    q = torch.randn(1, 1, 16, 200, dtype=torch.float16, requires_grad=True)
    ra.virtual_attention(q, q, q, "Causal()", ranks=2, kernel="aten_cuda:flash").sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_explain_gives_reasons() -> None:
    kernel = AtenCuda(None, torch.bfloat16, deterministic=False)
    kernel.use(CudaDevice((8, 0)), 128)
    told = kernel.explain(BAND)
    assert told.calls == (("flash", 1),) and {op for op, _ in told.left_out} == {"cudnn", "efficient"}
    assert "has no windows" in str(told)
    cpu = get_kernel("aten_cpu", *[torch.zeros(1, 1, 4, 8)] * 3)
    assert str(cpu.explain(SQUARE)) == "dense flash for CPUs"
    assert dict(cpu.explain(BAND).calls).keys() == {"masked flash for CPUs", "causal flash for CPUs"}


def test_bad_numbers_on_emulated_ops(ops: EmulatedOps) -> None:
    """Every row that sees a NaN is NaN in out and dq, and so are the gradients of the keys that such a row sees."""
    place = 17
    documents = "Documents([9, 1, 14, 0, 16])"
    for text in ("Causal()", "Causal() & (Window(5) | Sinks(3))", f"Causal() & {documents}", documents):
        mask = torch.from_numpy(ra.parse_pattern(text).mask(40)[0] > 0)
        for choice, rotate, which in itertools.product(("flash", "efficient"), ("kv", "q"), range(4)):
            q, k, v, grad = (torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(i)) for i in range(4))
            (q, k, v, grad)[which][0, 0, place, 3] = torch.nan
            rows = mask[:, place] if which in (1, 2) else torch.arange(40) == place
            inputs = [x.requires_grad_() for x in (q, k, v)]
            options = {"ranks": 3, "layout": "zigzag", "kernel": f"aten_cuda:{choice}", "rotate": rotate}
            out = ra.virtual_attention(*inputs, text, **options)
            dq, dk, _ = torch.autograd.grad(out, inputs, grad)
            for x, wanted in ((out, rows & (which < 3)), (dq, rows), (dk, mask[rows].any(0))):
                assert x[0, 0].isnan().any(-1)[wanted].all(), (text, options, which)
    assert ops.calls
