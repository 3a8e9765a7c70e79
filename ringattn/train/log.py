"""A log of the steps of a training run: a line in the terminal, a line of JSON, and a picture."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..files import write_text
from ..runtime import peak_memory
from ..text import plural, size
from .loss import mean_over_ranks


class Log:
    """Prints and stores the loss, tokens/s and memory of each step, and draws them: `log(loss)` after each step.

    folder: gets `log.jsonl`, one line per step, and, if matplotlib is installed, `log.png`, after each evaluation.
    tokens: the number of tokens of a step, on all ranks.
    held_out: returns the loss of other texts; called on all ranks in each `every`-th step, without gradients, in time
        that no step counts.

    The time of a step runs from the end of the last call to this one: whatever a program does in between, such as
    saving a checkpoint, counts.

    Calls are collective, and rank 0 writes. Losses are means over the ranks. Memory is the peak so far of the rank that
    needed most, on CUDA that of torch's tensors.

    `state_dict` and `load_state_dict`, which torch.distributed.checkpoint calls, keep `step`, the number of steps. The
    lines of later steps, and of a folder's earlier run, are dropped.
    """

    def __init__(
        self, folder: str | Path, tokens: int, *, held_out: Callable[[], Tensor] | None = None, every: int = 10
    ) -> None:
        self.folder, self.tokens, self.held_out, self.every = Path(folder), tokens, held_out, every
        self.step, self._began = 0, time.perf_counter()
        self._path, self._lines = self.folder / "log.jsonl", list[dict[str, Any]]()
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def __call__(self, loss: Tensor) -> dict[str, Any]:
        """Log a step; returns what its line of JSON holds, on every rank."""
        mean = float(mean_over_ranks(loss))  # waits for the device
        rate, self.step = self.tokens / (time.perf_counter() - self._began), self.step + 1
        peak = torch.cuda.max_memory_allocated() if loss.is_cuda else peak_memory.peak()
        most = torch.tensor(peak, device=loss.device)
        if self._ranks > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        line = {
            "step": self.step, "loss": mean, "tokens_per_second": rate, "peak_bytes": int(most), "ranks": self._ranks
        }  # fmt: skip
        if self.held_out is not None and self.step % self.every == 0:
            with torch.no_grad():
                line["held_out"] = float(mean_over_ranks(self.held_out()))
        if self._rank == 0:
            self._write(line)
        self._began = time.perf_counter()
        return line

    def _write(self, line: dict[str, Any]) -> None:
        if not self._lines:  # those before the step; a run that died may have left others, and half a line
            self.folder.mkdir(parents=True, exist_ok=True)
            old = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
            found = [json.loads(text) for text in old if text.endswith("\n")]
            self._lines = [other for other in found if other["step"] < line["step"]]
            write_text(self._path, "".join(json.dumps(other) + "\n" for other in self._lines))
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        rate, memory = f"{line['tokens_per_second']:,.0f} tokens/s", size(line["peak_bytes"])
        held_out = f"  held out {line['held_out']:.4f}" if "held_out" in line else ""
        sys.stdout.write(f"step {line['step']:5}  {rate:>18}  {memory:>9}  loss {line['loss']:.4f}{held_out}\n")
        sys.stdout.flush()
        if held_out and find_spec("matplotlib") is not None:
            self._draw()

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 6), layout="constrained")
        top, middle, bottom = figure.subplots(3, sharex=True, height_ratios=(3, 1, 1))
        for axes, key, label, unit in (
            (top, "loss", "loss", 1),
            (top, "held_out", "loss", 1),
            (middle, "tokens_per_second", "tokens/s", 1),
            (bottom, "peak_bytes", "peak GiB of a rank", 2**30),
        ):
            if points := [(line["step"], line[key] / unit) for line in self._lines if key in line]:
                axes.plot(*zip(*points, strict=True), "o-" if key == "held_out" else "-", label=key.replace("_", " "))
            axes.set(ylabel=label, ylim=(0, None))
        ranks = ", then ".join(dict.fromkeys(plural(line["ranks"], "rank") for line in self._lines))
        top.set_title(f"{self.folder.name}: {self.tokens:,} tokens a step, {ranks}", fontsize=10)
        top.legend(frameon=False)
        bottom.set_xlabel("step")
        figure.savefig(self.folder / "log.png", dpi=150)

    def state_dict(self) -> dict[str, int]:
        """The number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind the step of a `state_dict`."""
        self.step, self._lines, self._began = state["step"], [], time.perf_counter()
