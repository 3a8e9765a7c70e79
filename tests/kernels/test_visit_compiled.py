"""The Triton kernels of a visit compiled for Hopper, which is not here: what their innermost loops hold.

`scripts/kernels` compares more devices and head dims, with FlexAttention beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
#: Instructions that a warp issues for 1,024 pairs, in the loops over partial and full tiles: as compiled on 2026-11-29
#: by Triton 3.7.1, and for each kernel fewer than FlexAttention's, or at most as many.
RECORDED = {"forward": (566, 402), "dq": (505, 348), "dkv": (582, 411)}
MARGIN = 1.03
#: Instructions, and the numbers of those that overwrite what a product still reads.
FIRST = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16].tnspB, R24"
SECOND = "HGMMA.64x128x16.F32.BF16 R24, R92, gdesc[UR20].tnspB, R24, gsb0"
THIRD = "HGMMA.64x64x16.F32.BF16 R120, R100, gdesc[UR20], R120, gsb0"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
PLANTED: list[tuple[list[str], list[int]]] = [
    ([FIRST, SECOND, WAIT, "MOV R88, R3", "LDS.128 R92, [R5]"], []),
    ([FIRST, SECOND, "MOV R87, R88", "STS.128 [R88], R92", "@P0 BRA 0x0"], []),
    ([FIRST, SECOND, "@!P0 MOV R89, R3", WAIT], [2]),
    ([FIRST, "LDS.128 R85, [R5]", SECOND, "IMAD.WIDE R91, R3, R4, R6", "DADD R87, R2, R4", WAIT], [1, 3, 4]),
    ([FIRST, SECOND, THIRD, WAIT_BUT_ONE, "MOV R95, R3", "F2FP.BF16.F32.PACK_AB R101, R3, R2"], [5]),
    ([FIRST, SECOND, WAIT_BUT_ONE, "LDSM.16.M88.4 R95, [R5]"], [3]),
]
PROGRAM = """
import json, sys
import compiled_kernels as of

loops, overwritten = {}, {}
for name in of.PRODUCTS:
    made, pairs = of.compile_ours(name, (9, 0), 128)
    loops[name] = [(1024 * n / pairs, kinds["product"], kinds["wait"], kinds["local"]) for n, kinds in made.loops]
    overwritten[name] = of.find_overwritten(made.code)
planted = [of.find_overwritten(list(enumerate(code))) for code in json.loads(sys.argv[1])]
print(json.dumps([of.PRODUCTS, loops, overwritten, planted]))
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_loops_of_the_visit_kernel_on_hopper(tmp_path: Path) -> None:
    """In a process of its own: other tests of this process may interpret Triton's kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HELPERS)}
    command = [sys.executable, "-c", PROGRAM, json.dumps([code for code, _ in PLANTED])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    dots, loops, overwritten, planted = json.loads(done.stdout)
    for name, recorded in RECORDED.items():
        assert len(loops[name]) == 2, f"{name}: a loop over partial tiles, and one over full ones"
        for most, (instructions, products, waits, local) in zip(recorded, loops[name], strict=True):
            assert products >= dots[name] >= waits, f"{name}: products with more waits than that are serialised"
            assert local == 0, f"{name}: registers are spilled in a loop"
            assert instructions <= MARGIN * most, f"{name}: {instructions:.0f} instructions, {most} were recorded"
    assert loops.keys() == RECORDED.keys() and not any(overwritten.values()), overwritten
    assert planted == [[f"{number:#x}: {code[number]}" for number in wrong] for code, wrong in PLANTED]
