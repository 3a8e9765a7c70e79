"""Suite "gpu_quick": the cases of suite "gpu" at sizes that show in a minute that all run; the rates mean nothing."""

from __future__ import annotations

from functools import partial

from ..case import BenchSuite
from . import gpu

SIZES = gpu.Sizes(
    heads=2, head_dim=16, tokens=128, window=40, block=16, dilated=(64, 4), matmul=64, enough=0.0,
    lengths=(64, 128), chunk=96, long=(1 << 10, 256), long_heads=(2, 16), long_dilated=((32, 128), (1, 4)),
    rows=(16, 32), widths=(16,),
)  # fmt: skip
SUITE = BenchSuite(partial(gpu.list_cases, SIZES), gpu.conclude, gpu.check)
