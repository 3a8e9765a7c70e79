"""Compile the Triton kernels of a visit for GPUs that are not here, beside FlexAttention's, and compare their loops.

For each kernel: registers, stack and shared memory, and for each innermost loop that multiplies matrices, first over
partial tiles, then over full ones: instructions that the warps of a program issue for 1,024 pairs, those of
FlexAttention's template in its default configuration, waits for matrix products, and instructions on local memory.
FlexAttention's mask is a causal window, which takes two comparisons a pair, as any interval does. Both are compiled by
the ptxas that Triton finds; TRITON_PTXAS_PATH names another.

`scripts/kernels` ends with status 1 if a loop has more than 1.03 of FlexAttention's instructions, more waits than
matrix products, an instruction on local memory, or overwrites a register that an unfinished matrix product reads.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
import torch
import triton
from imported import import_file
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels import visit_triton
from ringattn.kernels.visit import choose_tiles

CAPABILITIES, HEAD_DIMS = ((8, 0), (9, 0), (10, 0)), (64, 128)
MOST = 1.03
PROGRAMS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
#: Matrix products of each kernel, and which loops of FlexAttention's templates do the same.
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}
#: Instructions by kind, as patterns of their names.
KINDS = {"product": r"HGMMA|HMMA|UTC\w*MMA", "wait": r"WARPGROUP\.DEPBAR", "local": r"STL|LDL"}
Loop = tuple[int, Counter[str]]


@dataclass(frozen=True)
class Compiled:
    """Machine code of a kernel: registers, stack and shared memory in bytes, instructions by address."""

    registers: int
    stack: int
    shared: int
    code: list[tuple[int, str]]

    @property
    def loops(self) -> list[Loop]:
        """(instructions, by kind) of the innermost loops with matrix products, in order of address."""
        spans = []
        end = max(address for address, text in self.code if "EXIT" in text)  # then come the slow paths of waits
        for address, text in self.code:
            jump = re.search(r"\bBRA(?:\.U)?\b.*?0x([0-9a-f]+)", text)
            if jump and int(jump[1], 16) < address < end:
                spans.append((int(jump[1], 16), address))
        found: dict[tuple[int, int], Loop] = {}
        for first, last in sorted(spans):
            names = [name_of(text) for address, text in self.code if first <= address <= last]
            kinds = Counter(kind for name in names for kind, pattern in KINDS.items() if re.match(pattern, name))
            if kinds["product"]:
                found[first, last] = len(names), kinds
        # Without loops around another; loops without products, such as a wait for a barrier, are part of theirs.
        return [
            loop
            for (first, last), loop in found.items()
            if not any(other != (first, last) and first <= other[0] and other[1] <= last for other in found)
        ]


def name_of(text: str) -> str:
    """The name of an instruction, without its predicate."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def compile_kernel(
    kernel: Any, types: dict[str, Any], capability: tuple[int, int], warps: int, stages: int
) -> Compiled:
    """Compile for a device that is not here. `types` are Triton's types of arguments, or values of constants."""
    names = kernel.arg_names
    signature = {name: types[name] if isinstance(types[name], str) else "constexpr" for name in names}
    constants = {(names.index(name),): value for name, value in types.items() if not isinstance(value, str)}
    # As a launch finds them: pointers and strides are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and re.search(r"_[bhn]$", name))
    }
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage, code = (
            subprocess.run([PROGRAMS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    instructions = [(int(at, 16), text.strip()) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;/]+);", code)]
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return Compiled(registers, stack, made.metadata.shared, instructions)


def compile_ours(name: str, capability: tuple[int, int], head_dim: int) -> tuple[Compiled, int]:
    """(a kernel of a visit in bf16, the pairs that a warp computes in a step)."""
    kernel = getattr(visit_triton, f"{name}_kernel")
    tiles = choose_tiles(torch.bfloat16, head_dim, capability)
    config = getattr(tiles, name)
    optional = ("shift", "centre", "streams", "steps")
    types: dict[str, Any] = {}
    for argument in kernel.arg_names:
        tensor = argument.rpartition("_")[0] or argument
        if argument in ("q", "k", "v", "do", "result"):
            types[argument] = "*bf16"
        elif argument in ("total", "delta", "dq", "dk", "dv"):
            types[argument] = "*fp32"
        elif argument in ("scale", "scale2", "ratio", "softcap2", "keep"):
            types[argument] = "fp32"
        elif argument in optional or argument == "places":
            types[argument] = None
        else:
            types[argument] = 0 if tensor in optional else 1 if argument in ("lse_n", "delta_n") else "i32"
    types |= {"lse": "*fp64" if name == "forward" else "*fp32", "table": "*i32"}
    types |= {"BN": config.step, "BLOCK": tiles.block, "D": head_dim, "DP": head_dim, "DV": head_dim, "DVP": head_dim}
    types |= {"HIDDEN": False, "CAP": False, "MANY": 0, "STAGES": config.stages}
    made = compile_kernel(kernel, types, capability, config.warps, config.stages)
    return made, tiles.block * config.step // config.warps


def compile_flex(part: str, capability: tuple[int, int], head_dim: int, folder: Path) -> tuple[Compiled, list[int]]:
    """(FlexAttention's "flex_attention" or "flex_backwards", the pairs that a warp computes in a step of each loop)."""
    with patch("torch.cuda.get_device_capability", return_value=capability):
        heuristic = CUDAConfigHeuristic()
        if part == "flex_attention":
            of = {8: "a100", 9: "h100", 10: "sm_100"}[capability[0]]
            config = getattr(heuristic, f"{of}_default_flex_config")[torch.bfloat16, head_dim]
            sizes = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
            pairs = [config.block_m * config.block_n // config.num_warps]
        else:
            (config,) = heuristic.get_flex_attn_bwd_configs(head_dim, torch.bfloat16)
            names = ("block_m1", "block_n1", "block_m2", "block_n2")
            sizes = {name.upper(): getattr(config, name) for name in names}
            of_query, of_key = config.block_m2 * config.block_n2, config.block_m1 * config.block_n1
            pairs = [of_query // config.num_warps, of_key // config.num_warps]
    kernel = render_flex(part, head_dim, sizes, folder)
    types = {name: "*bf16" for name in kernel.arg_names}
    types |= dict.fromkeys(("arg_LSE", "arg_DELTA"), "*fp32")
    types |= {name: "*i32" for name in kernel.arg_names if name.endswith(("BLKS", "IDX"))}
    return compile_kernel(kernel, types, capability, config.num_warps, config.num_stages), pairs


def render_flex(part: str, head_dim: int, sizes: dict[str, int], folder: Path) -> Any:
    """A template of the installed torch as a Triton kernel for 16,384 tokens and 16 heads, with a causal window."""
    heads, tokens = 16, 16_384
    blocks = tokens // 128
    shapes = dict.fromkeys(("Q", "K", "V", "DO", "DQ", "DK", "DV"), (1, heads, tokens, head_dim))
    shapes |= dict.fromkeys(("KV_NUM_BLKS", "FULL_KV_NUM_BLKS", "Q_NUM_BLKS", "FULL_Q_NUM_BLKS"), (1, 1, blocks))
    shapes |= dict.fromkeys(("KV_IDX", "FULL_KV_IDX", "Q_IDX", "FULL_Q_IDX"), (1, 1, blocks, blocks))
    options: dict[str, Any] = {
        **{"INDEX_DTYPE": "tl.int32", "FLOAT32_PRECISION": "'ieee'", "SM_SCALE": head_dim**-0.5},
        **dict.fromkeys(("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "USE_TMA"), False),
        **dict.fromkeys(("IS_DIVISIBLE", "HAS_FULL_BLOCKS", "SAFE_HEAD_DIM"), True),
        **dict.fromkeys(("QK_HEAD_DIM", "QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM", "V_HEAD_DIM_ROUNDED"), head_dim),
        **{"GQA_SHARED_HEADS": 1, "SPARSE_Q_BLOCK_SIZE": 128, "SPARSE_KV_BLOCK_SIZE": 128, **sizes},
        **({"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False} if part == "flex_attention" else {"WRITE_DQ": True}),
    }
    target = "OUT" if part == "flex_attention" else "DK"
    shapes["OUT"] = shapes["Q"]
    definitions = [f"{key}: tl.constexpr = {value}" for key, value in options.items()]
    arguments: list[str] = []

    def strides(name: str) -> list[int]:
        sizes = shapes[name]
        return [int(torch.tensor(sizes[i + 1 :]).prod()) for i in range(len(sizes))]

    def stride(name: str, dim: int | None = None) -> str:
        return ", ".join(map(str, strides(name))) if dim is None else str(strides(name)[dim])

    def def_kernel(*names: str) -> str:
        arguments.extend((*names, target))
        lines = [f"@triton.jit\ndef kernel({', '.join(f'arg_{name}' for name in arguments)}):"]
        lines += [f"{name} = arg_{name}" for name in arguments]
        return "\n    ".join([*lines, *definitions])

    def modification(subgraph_number: int, output_name: str | None, **given: str) -> str:
        if output_name is None:
            return "pass"
        if output_name == "post_mod_scores":
            return f"{output_name} = {given['score']}"
        if output_name == "grad_scores":
            return f"{output_name} = {given['grad_score_mod']}"
        m, n = given["m"], given["n"]
        return f"{output_name} = ({m} >= {n}) & ({m} - {n} <= 1023)"

    def store_output(index: tuple[str, ...], value: str, mask: str, **_: Any) -> str:
        at = " + ".join(f"{i} * {s}" for i, s in zip(index, strides(target), strict=True))
        return f"tl.store({target} + {at}, {value}.to({target}.dtype.element_ty), {mask})"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, depth: text.replace("\n", "\n" + "    " * depth)
    files = (part, "utilities", "common") if part == "flex_attention" else (part, "utilities")
    source = Path(torch.__path__[0]) / "_inductor" / "kernel" / "flex" / "templates"
    template = environment.from_string("\n".join((source / f"{name}.py.jinja").read_text() for name in files))
    text = template.render(
        **options,
        def_kernel=def_kernel,
        gen_defines=lambda: "\n".join(definitions),
        gen_argdefs=lambda: ", ".join(f"arg_{name}" for name in arguments),
        modification=modification,
        store_output=store_output,
        stride=stride,
        size=lambda name, dim: str(shapes[name][dim]),
    )
    path = folder / f"{part}_{head_dim}_{'_'.join(map(str, sizes.values()))}.py"
    path.write_text(f"import triton\nimport triton.language as tl\n{text}")
    return import_file(path).kernel


def find_overwritten(code: list[tuple[int, str]]) -> list[str]:
    """Instructions that write a register which an unfinished HGMMA reads, as ptxas before 13.3 can make them.

    "gsb0" ends a group of HGMMA, and a wait leaves so many groups unfinished. Jumps are not followed.
    """
    found: list[str] = []
    groups: list[list[range]] = [[]]  # the registers that unfinished HGMMA read; the last group has not ended
    for address, text in code:
        name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        if name.startswith("WARPGROUP.DEPBAR"):
            left = int(re.search(r"0x([0-9a-f]+)", rest)[1], 16)  # type: ignore[index]
            groups = groups[-1 - left :]
        elif name.startswith("HGMMA"):
            if register := re.match(r"R(\d+)", operands[1]):
                groups[-1].append(range(int(register[1]), int(register[1]) + 4))
            if "gsb0" in operands:
                groups.append([])
        elif not name.startswith(("ST", "BAR", "BRA", "LDGSTS", "RED", "ATOM", "SYNCS", "UTMA")):
            register = re.match(r"R(\d+)", operands[0])
            width = 4 if re.search(r"\.128|\.M88\.4", name) else 2 if re.search(r"64|WIDE|^D[A-Z]", name) else 1
            written = range(int(register[1]), int(register[1]) + width) if register else range(0)
            if any({*written} & {*read} for group in groups for read in group):
                found.append(f"{address:#x}: {text}")
    return found


def compare(capability: tuple[int, int], head_dim: int, folder: Path) -> tuple[list[str], list[str]]:
    """(lines of the table, faults) of the three kernels for one compute capability and head dim."""
    forward, pairs = compile_flex("flex_attention", capability, head_dim, folder)
    backward, (dq_pairs, dkv_pairs) = compile_flex("flex_backwards", capability, head_dim, folder)
    flex = {
        "forward": [(n, pairs[0]) for n, _ in forward.loops],
        "dq": [(n, dq_pairs) for n, _ in backward.loops[:2]],
        "dkv": [(n, dkv_pairs) for n, _ in backward.loops[2:]],
    }
    lines, faults = [], []
    for name, products in PRODUCTS.items():
        made, ours = compile_ours(name, capability, head_dim)
        place = f"{name} of head dim {head_dim} for {capability[0]}.{capability[1]}"
        assert len(made.loops) == len(flex[name]) == 2, (
            f"{place}: expected a loop over partial, and one over full tiles"
        )
        if capability == (9, 0):
            faults += [f"{place}: {text} overwrites what a product reads" for text in find_overwritten(made.code)]
        for tiles, (count, kinds), (theirs, of) in zip(("partial", "full"), made.loops, flex[name], strict=True):
            issued, reference = (1024 * n / pairs for n, pairs in ((count, ours), (theirs, of)))
            lines.append(
                f"{capability[0]}.{capability[1]:<4}{head_dim:>4}  {name:<8}{made.registers:>5}{made.stack:>7}"
                f"{made.shared:>9}  {tiles:<8}{issued:>7.0f}{reference:>7.0f}{issued / reference:>7.2f}"
                f"{kinds['wait']:>6}{kinds['local']:>6}"
            )
            if issued > MOST * reference:
                faults.append(f"{place}, {tiles} tiles: {issued / reference:.2f} of FlexAttention's instructions")
            if kinds["local"]:
                faults.append(f"{place}, {tiles} tiles: {kinds['local']} instructions on local memory")
            if kinds["wait"] > products:
                faults.append(f"{place}, {tiles} tiles: {kinds['wait']} waits for {products} products")
    return lines, faults


def main() -> int:
    ptxas = subprocess.run([triton.knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, check=True)
    print(f"Triton {triton.__version__}, torch {torch.__version__}, {ptxas.stdout.splitlines()[-2]}, bf16")
    print("cap.    D  kernel   regs  stack   shared  tiles      ours   Flex  ratio waits local")
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for capability in CAPABILITIES:
            for head_dim in HEAD_DIMS:
                lines, found = compare(capability, head_dim, Path(folder))
                print("\n".join(lines), flush=True)
                faults += found
    print("\n".join(faults) or "no fault")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
