"""What cannot be used is refused in a line, before anything is computed or written: files, sizes, patterns and
paths."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Inside, Refused
from safetensors.torch import save_file

from ringattn.cli.tensor_files import read_npz
from ringattn.errors import InvalidInput
from ringattn.files import replacing, write_text

NAMES = ("q", "k", "v")
ROWS = 256
NUMBERS = np.random.default_rng(0).standard_normal((1, 2, ROWS, 8)).astype(np.float32)
VIRTUAL = ("run", "transport=virtual", "ranks=2", "tokens=64", "heads=2", "head_dim=8", "repeat=1", "threads=1")
DECODE = ("run", "transport=virtual", "mode=decode")
ALL_RANKS = ("verify", "whole=true")
MANY_RANKS = ("simulate", "ranks=262144", "tokens=1G")


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_npz_that_numpy_writes_is_read_and_a_broken_one_refused(tmp_path: Path, pack: Callable[..., None]) -> None:
    path = tmp_path / "x.npz"
    pack(path, **dict.fromkeys(NAMES, NUMBERS))
    assert np.array_equal(read_npz(path, NAMES)["k"].numpy(), NUMBERS)
    whole = path.read_bytes()
    for broken in (whole[:-100], b"PK\x03\x04 not whole", b"no array"):
        path.write_bytes(broken)
        with pytest.raises(InvalidInput, match=r"x\.npz: .*; write the file again with numpy\.savez"):
            read_npz(path, NAMES)
    pack(path, q=NUMBERS.astype(np.int64))
    with pytest.raises(InvalidInput, match=r"q has dtype torch\.int64; convert"):
        read_npz(path, NAMES)


def make_files(folder: Path) -> None:
    """Files and folders that calls below name: q, k and v that do not fit or are not whole, pipes and links."""
    q, k, v = good = tuple(torch.ones(1, heads, 40, 8) for heads in (4, 2, 2))
    for name, tensors in (
        ("good", good),
        ("two", (q, k)),
        ("mixed", (q, k, v.double())),
        ("short", (q, k[:, :, :39].contiguous(), v)),
    ):
        save_file(dict(zip(NAMES, tensors, strict=False)), folder / f"{name}.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "good.safetensors").read_bytes()[:-100])
    (folder / "cut.npz").write_bytes(b"PK\x03\x04 not whole")
    (folder / "x.txt").write_text("abc")
    (folder / "folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("nowhere/x.json")
    (folder / "circle").symlink_to("circle")


#: A run on the tensors of a file.
FILE = ("run", "input=file", "output.path=y.safetensors")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*FILE, "input.path=none.safetensors"), "no such file"),
        ((*FILE, "input.path=cut.safetensors"), "not a complete safetensors file"),
        ((*FILE, "input.path=two.safetensors"), "tensor 'v' is missing"),
        ((*FILE, "input.path=mixed.safetensors"), "q, k and v do not match"),
        ((*FILE, "input.path=short.safetensors"), "q, k and v do not match"),
        ((*FILE, "input.path=cut.npz"), "write the file again with numpy.savez"),
        ((*FILE, "input.path=x.txt"), "expected a .safetensors or .npz file"),
        (("run", "input=file"), "input=file needs input.path=..., a .safetensors or .npz file"),
        (("run", "input=file", "input.path=./x.npz", "output.path=x.npz"), "is the input, which it would overwrite"),
        (("run", "input=random", "output.path=x.pt"), "output.path=x.pt: the output is a safetensors file"),
        (("run", "tokens=64", "output.path=folder.safetensors"), "is a folder"),
        (("run", "input.path=x.txt", "tokens=10"), "has only 3 bytes; try tokens=3"),
        ((*VIRTUAL, "kernel=aten_cuda", "input=random"), "needs tensors on a cuda device"),
        (("paln",), "did you mean 'plan'?"),
        (("run", "--help", "machines"), "takes the name of a group: pattern, layout"),
        (("run", "--ranks", "4"), "--ranks: unknown option; write ranks=4; settings"),
        (("simulate", "--tokens=4k"), "write tokens=4k; settings"),
        (("plan", "ranks=1.5"), "ranks=1.5: not a whole number; write 4096, 64k"),
        (("run", "com_dtype=bfloat16"), "com_dtype: no such key; did you mean 'comm_dtype'?"),
        (("run", "input.pth=x"), "input.pth: no such key; did you mean 'path'?"),
        (
            ("run", "pattern=casual"),
            "pattern=casual: no such option; did you mean 'causal'? expected one of causal, dilated",
        ),
        (("run", "mode=numerics"), "mode=numerics: expected one of attention, decode"),
        (("plan", "-m", "ranks=2,two", "tokens=64"), "ranks=two: expected a whole number, such as 8 or 64k"),
        (("plan", "-m", "ranks=2,4", "output.path=p.json"), "'output.path=p_${hydra:job.num}.json'"),
        (("verify", "-m", "seed=1,2", "output.path=x.json"), "each job would overwrite"),
        (("score", "-m", "passes=1,2"), "passes=1,2: passes is a key of ringattn simulate, not of ringattn score"),
        (("plan", "tokens=1k", "q_first=2k"), "q_first=2k: there are only 1,024 keys; give smaller values"),
        (("plan", "tokens=1k", "q_tokens=2k"), "q_tokens=2k: there are only 1,024 keys; give smaller values"),
        (("plan", "output.path=/proc/p.json"), "no file can be made in /proc"),
        (("plan", "ranks=2", "output.path=no/such/p.json"), "the folder no/such does not exist"),
        (("plan", "pattern=Causal() & Windw(3)"), "did you mean 'Window'"),
        (("simulate", "backward=maybe"), "backward=maybe: expected true or false"),
        (("simulate", "slow={1"), "slow={1: no viable alternative at input '{1'"),
        (("simulate", "tokens=${nope}"), "Interpolation key 'nope' not found; ringattn"),
        (("calibrate", "rows=5"), "rows=5: Invalid value assigned: int is not a ListConfig"),
        (("plan", "machine.flops=fast"), "machine.flops=fast: expected a number, such as 2.5"),
        (("report", "suite=ring", "cases=[x]"), "cases=x: unknown; expected some of dense_4096"),
        (("run", "ranks", "4"), "ranks: settings are written key=value; try ranks=4"),
        (("run", "output=foo"), "output is a section; set path, report in it, such as output.path=foo"),
        (("run", "pattern=causal & window"), "names cannot be combined; write the whole expression, such as pattern="),
        (("plan", "pattern=[causal,window]"), "names cannot be combined; write the whole expression, such as pattern"),
        (("plan", "pattern=window left=10"), "two settings in one word"),
        (("plan", "pattern=window", "left=10"), "left: no such key; write pattern.left"),
        (("run", "-n", "2"), "the number of ranks is ranks=..."),
        (("run", "machine=h100"), "machine=h100: no such option; did you mean 'h100_500w_ib'?"),
        (("run", "-cn", "mine"), "-cn: each verb has one configuration; put your own settings into FOLDER/"),
        (("report", "standard", "longg"), "longg: settings are written key=value; try report --help"),
        (("report", "billion"), "suite=billion: unknown; expected one of "),
        (("report", "standard", "memory=8GB"), "memory=8GB: not a whole number"),
        (("report", "compare=[old.jsonl]"), "compare: expected two results"),
        (("report", "--compare", "it's old.jsonl", "new.jsonl", "noise=0.2"), "compare=it's old.jsonl: no such file"),
        (("plan", "--compare", "old.jsonl", "new.jsonl"), "--compare is an option of ringattn report"),
        (("report", "results=old.jsonl"), "results=old.jsonl: no such file"),
        (("report", "--json"), "--json: ringattn report prints no JSON; use it with run, plan, simulate"),
        (("run", "output.report=missing/x.json"), "the folder missing does not exist"),
        (("study", "scaling", "--json"), "--json: ringattn study prints no JSON"),
        (("simulate", "-m", "ranks=2,4", "--json"), "a study writes a folder, with --json too"),
        (("verify", "trace=t.json"), "trace is a key of ringattn run and simulate, not of ringattn verify"),
        (("simulate", "model=llama3_8b"), "model is a key of ringattn advise, audit and estimate, not of"),
        (("estimate", "ranks=4"), "ranks is a key of ringattn run, plan, simulate, verify, "),
        (("plan", "slow={5: 2}"), "slow={5: 2}: slow is a key of ringattn simulate, not of ringattn plan"),
        (("advise", "gpus=8", "output.page=-"), "output.page=-: a page is written to a file only"),
        (("doctor", "capability=new"), "expected a compute capability such as 9.0"),
        (("plan", "pattern=null"), "Config group override must be"),
        (("plan", "-m", "pattern=causal,nul"), "pattern=nul: no such option"),
        (("plan", "tokens=" + "9" * 400), "must be at most 2^63 - 1"),
        (("plan", "tokens=" + "9" * 5000), "4300 digits"),
        (("report", "suite=ring", "cases=[]"), "cases=[]: unknown; expected some of dense_4096"),
        (("plan", "-m", "ranks=2,4", "hydra.launcher._target_=os.system"), "Invalid plugin 'os.system'"),
        (("simulate", "machine.flops=1e-300", "passes=10"), "flops=1e-300 must be a number from 1e-30"),
        (("plan", "tokens=64", "heads=1e5"), "heads=100,000: must be at most 4,096"),
        (("simulate", "head_dim=1e18"), "must be at most 65,536: no kernel"),
        (("plan", "tokens=64", "pattern=Window(1, **x)"), "** is not understood"),
        (("plan", "tokens=64", "pattern=Window(left=1, left=2)"), "gives left twice"),
        (("plan", "tokens=64", "pattern=" + "Window(1) & " * 5000 + "Full()"), "nested too deep"),
        (("plan", "tokens=64", f"output.path={'x' * 300}"), "File name too long"),
        (("report", f"output.path={'x' * 300}"), "File name too long"),
        (("plan", "schedule=auto", "machine=file", "machine.path=pipe"), "is a pipe or a device"),
        (("plan", "tokens=64", "output.path=link"), "the folder "),
        (("plan", "tokens=64", "output.path=circle"), "cannot be written"),
        ((*VIRTUAL, "input.path=pipe"), "is a pipe or a device"),
        ((*VIRTUAL, "threads=100000"), "threads=100,000: must be 1 .. "),
        ((*VIRTUAL, "timeout=1e30"), "at most 31,536,000"),
        ((*VIRTUAL, "tokens=1T", "input=random"), "but this machine has "),
        ((*VIRTUAL, "ranks=20000"), "ranks=20,000: at most 16,384 virtual ranks fit in one process"),
        (("run", "tokens=1T", "input=random", "ranks=2"), "but this machine has "),
        (("verify", "ranks=1e9", "tokens=64"), "every rank is visited"),
        (("verify", "tokens=64", "spread=0"), "spread=0: "),
        (("verify", "stalls=[[1,0,0.5]]"), "stalls=[[1,0,0.5]]: stalls is a key of ringattn simulate, not of"),
        (("verify", "row=3"), "did you mean 'rows'?"),
        ((*ALL_RANKS, "ranks=8", "backward=true", "count=2"), "exchanges gradients"),
        (("simulate", "rows=3"), "rows=3: rows is a key of ringattn verify and calibrate, not of"),
        (("simulate", "stalls=[[1, 2]]"), "stalls=[[1, 2]]: expected a list of [rank, step, seconds]"),
        (("simulate", "slow=3"), "slow: expected a factor for each of"),
        (("simulate", "seed=3"), "seed=3: seed is a key of ringattn verify, not of ringattn simulate"),
        ((*DECODE, "tokens=64"), "tokens=64 has no meaning with mode=decode"),
        ((*DECODE, "backward=true"), "backward=True has no meaning with mode=decode"),
        ((*DECODE, "new=0"), "of at least 1"),
        ((*DECODE, "pattern='Full()'"), "tokens see later ones, but decoding is causal"),
        ((*DECODE, "merge=tree"), "merge='tree': expected one of auto, gather, scatter"),
        (("run", "transport=virtual", "new=4"), "new=4 has no meaning without mode=decode"),
        (("run", "transport=virtual", "mode=decoding"), "mode=decoding: did you mean 'decode'"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_line_and_nothing_else(refused: Refused, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    make_files(tmp_path)
    before = sorted(tmp_path.iterdir())
    told = refused(*arguments)
    assert words in told and len(told) < 1500
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "outputs"] == before


def test_long_patterns_are_read(inside: Inside, tmp_path: Path) -> None:
    """The text between two commas is no name of a file."""
    inside("plan", "tokens=8", "ranks=2", "pattern=" + "Window(1) & " * 30 + "Causal()")


def test_the_mode_of_an_output_is_kept(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_text("secret")
    path.chmod(0o600)
    with replacing(path) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600  # never open to others, not even for a moment
        temporary.write_text("new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)
    mask = os.umask(0o027)
    try:
        write_text(other, "")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(other.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_signals_at_start_up(tmp_path: Path, number: int, status: int, word: str) -> None:
    """Sent while a package is imported, by the import itself: no wait, and the same moment every time."""
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job inherits SIG_IGN
        "from ringattn.cli.main import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'omegaconf': os.kill(os.getpid(), {int(number)})\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'omegaconf']: del sys.modules[name]\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['ringattn', 'plan', 'tokens=64', 'ranks=2']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (status, f"ringattn: {word}\n")


def test_bad_values_of_a_run_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ringattn.cli.main import main\n"
        "sys.modules['torch'] = None\n"  # an import fails
        "for words in sys.argv[1:]:\n"
        "    sys.argv = ['ringattn', 'run', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 2\n"
    )
    told = {
        "ranks=0": "ranks=0: must be at least 1",
        "repeat=0": "repeat=0: must be at least 1",
        "pattern=Windw(3)": "did you mean 'Window'?",
        "tokens=12x": "tokens=12x: not a whole number",
        "heads=8 kv_heads=3": "8 query heads cannot share 3 key/value heads",
        "head_dim=0": "head_dim=0",
        "dtype=int8": "dtype int8 is not supported",
        "rotate=up": "rotate",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *told], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    lines = done.stderr.splitlines()
    assert len(lines) == len(told) and all(map(str.__contains__, lines, told.values())), done.stderr
