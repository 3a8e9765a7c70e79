"""Train a byte-level language model on dp x cp ranks, with checkpoints that any number of ranks can continue.

    torchrun --nproc-per-node 4 --max-restarts 1 examples/train_lm/train.py dp=2 cp=2

Every run writes to a folder of its own; resume=FOLDER continues the run in it. Except for rounding, losses do not
depend on the number of ranks.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ringattn as ra
from ringattn.files import write_text
from ringattn.runtime import peak_memory
from ringattn.train import NO_LABEL, count_labels, linear_cross_entropy, mean_over_ranks

sys.path.insert(0, str(Path(__file__).parent))
from model import Decoder
from text import Text, shift

#: How often torchrun has restarted these ranks.
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _read(state: dict[str, Any], checkpoint: Path) -> None:
    """Fill `state` from the files of a checkpoint. Collective."""
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise ra.InvalidInput(
            f"{checkpoint} cannot be read ({cause}); remove this folder to continue from the checkpoint before it"
        ) from error


def _last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint of a run, or None."""
    return max(folder.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")), default=None)


class Run:
    """A training run on this rank: model, optimizer, and the files of the run."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.folder = cfg, Path(cfg.resume or cfg.output)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if cfg.dp * cfg.cp != self.ranks or cfg.rows % cfg.dp:
            raise ra.InvalidInput(
                f"dp={cfg.dp} cp={cfg.cp} rows={cfg.rows}: dp * cp must be the number of ranks, {self.ranks} "
                "(torchrun --nproc-per-node), and rows a multiple of dp"
            )
        for name in ("rows", "tokens", "steps", "checkpoint_every", "evaluate_every"):
            if not isinstance(cfg[name], int) or cfg[name] < 1:
                raise ra.InvalidInput(f"{name}={cfg[name]}: expected a whole number >= 1")
        if cfg.log not in ("tensorboard", "wandb", None):
            raise ra.InvalidInput(f"log={cfg.log}: expected tensorboard, wandb or null")
        mesh = init_device_mesh("cpu", (cfg.dp, cfg.cp), mesh_dim_names=("dp", "cp"))
        self.dp, self.cp = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
        place = {"group": mesh["cp"].get_group(), "layout": cfg.layout, "schedule": cfg.schedule}
        torch.manual_seed(cfg.seed)  # every rank makes the same model
        self.layout = ra.make_layout(cfg.layout, tokens=cfg.tokens, ranks=cfg.cp)
        self.text, self.held_out = (Text(cfg.tokens, cfg.seed, held_out=x) for x in (False, True))
        # DDP averages gradients over all dp * cp ranks, as linear_cross_entropy expects.
        self.model = DistributedDataParallel(Decoder(**cfg.model, place=place))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
        self.step = 0
        self.speeds: list[float] = []

    @property
    def settings(self) -> str:
        """The settings of the model, as text."""
        return " ".join(
            f"model.{name}={value}" for name, value in sorted(OmegaConf.to_container(self.cfg.model).items())
        )

    def load(self) -> None:
        """Continue from the last checkpoint of the folder, whatever the number of ranks that wrote it.

        Raises InvalidInput if there is no checkpoint to resume, if no step is left, or if a new run would overwrite
        another.
        """
        if self.rank == 0:
            for unfinished in self.folder.glob("unfinished_*"):  # left by a run that died while saving
                shutil.rmtree(unfinished)
        last = _last_checkpoint(self.folder)
        if last is None and self.cfg.resume:
            raise ra.InvalidInput(
                f"resume={self.folder} has no checkpoint, such as step_000020; give the folder of a run"
            )
        if last is not None:
            if not self.cfg.resume and not RESTARTS:
                raise ra.InvalidInput(
                    f"output={self.folder} is the folder of another run; continue that with resume={self.folder}, or "
                    "leave output out for a new folder"
                )
            settings = {"settings": ""}
            _read(settings, last)
            if settings["settings"] != self.settings:
                raise ra.InvalidInput(
                    f"{last} is a checkpoint of a model with {settings['settings']}, but this run has {self.settings}; "
                    "give the same model, or leave resume out for a new run"
                )
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
            _read(state, last)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.step = int(state["step"])
            if self.step >= self.cfg.steps:
                raise ra.InvalidInput(
                    f"steps={self.cfg.steps}: nothing to train, as {self.folder} has {self.step}; increase steps="
                )
        dist.barrier()

    def save(self) -> None:
        """Write a checkpoint under a temporary name, and rename it when it is complete."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        unfinished = self.folder / f"unfinished_{self.step:06d}"
        step = torch.tensor(self.step)
        state = {"model": model, "optimizer": optimizer, "step": step, "settings": self.settings}
        dcp.save(state, checkpoint_id=unfinished)
        if self.rank == 0:
            unfinished.rename(self.folder / f"step_{self.step:06d}")
        dist.barrier()

    def batches(self, text: Text, step: int) -> list[tuple[torch.Tensor, torch.Tensor, ra.Documents]]:
        """(ids, labels, documents) of this rank's shard, for each row of the step that its dp group computes."""
        found = []
        for row in range(self.dp, self.cfg.rows, self.cfg.dp):
            ids, lengths = text.row(step, row)
            labels = shift(ids, lengths, NO_LABEL)
            local = [self.layout.shard_tensor(x, self.cp, dim=1) for x in (ids, labels)]
            found.append((*local, ra.Documents(lengths)))
        return found

    def losses(self, batches: list[tuple[torch.Tensor, torch.Tensor, ra.Documents]]) -> Iterator[torch.Tensor]:
        """Each row's share of the loss; the shares add up to the mean over all labels of all rows."""
        total = count_labels(torch.cat([labels for _, labels, _ in batches], 1))
        positions = torch.from_numpy(self.layout.positions(self.cp))
        for number, (ids, labels, documents) in enumerate(batches):
            self.model.require_backward_grad_sync = number == len(batches) - 1  # average gradients once per step
            hidden = self.model(ids, positions, documents)
            yield linear_cross_entropy(hidden, self.model.module.embedding.weight, labels, total=total)

    def train(self) -> float:
        """Run one step and return its loss."""
        result = torch.zeros(())
        for loss in self.losses(self.batches(self.text, self.step)):
            loss.backward()
            result += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.lr * min(1.0, (self.step + 1) / self.cfg.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(mean_over_ranks(result))

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on held-out topics, the same rows every time."""
        return float(mean_over_ranks(torch.stack(list(self.losses(self.batches(self.held_out, 0)))).sum()))

    def report(self, line: dict[str, Any]) -> None:
        """Append a line to losses.jsonl and print it."""
        self.speeds.append(line["tokens_per_second"])
        with (self.folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        held_out = f"  held out {line['held_out']:.4f}" if "held_out" in line else ""
        speed = f"{line['tokens_per_second']:,.0f} tokens/s"
        print(f"step {self.step:4d}/{self.cfg.steps}  loss {line['loss']:.4f} nats/byte  {speed}{held_out}", flush=True)


def log_to(tool: str | None, run: Run) -> Callable[..., object]:
    """A function `log(numbers, step=)` that writes a step's numbers to TensorBoard or Weights & Biases, or nowhere."""
    if tool == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run.folder, purge_step=run.step + 1)

        def log(numbers: dict[str, float], step: int) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)
            writer.flush()

        return log
    if tool == "wandb":
        import wandb

        return wandb.init(project="ringattn", id=run.folder.name, dir=run.folder, resume="allow").log
    return lambda numbers, step: None


def keep_lines(path: Path, step: int) -> None:
    """Drop the lines of losses.jsonl after `step`; a run that died may have left later lines, and half a line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    write_text(path, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))


def plot(run: Run) -> None:
    """Draw losses.jsonl as loss.png."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install 'ringattn[plot]' for loss.png")
        return
    cfg, lines = run.cfg, [json.loads(line) for line in (run.folder / "losses.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training, the step's rows", "-"), ("held_out", "topics held out", "o-")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.5, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None), xlim=(0, None))
    ranks = ", then ".join(dict.fromkeys(line["ranks"] for line in lines))
    axes.set_title(
        f"A byte-level decoder on the topics of Python's help: {run.folder.name}\n"
        f"{cfg.rows} x {cfg.tokens:,} bytes a step, packed documents, {ranks}",
        fontsize=10,
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(run.folder / "loss.png", dpi=150)
    print(f"plot: {run.folder / 'loss.png'}")


def compare(run: Run, before: int) -> None:
    """Print measured speed and peak memory, and what `ra.simulate` predicts for attention.

    before: bytes of memory that this rank used before its first step.
    """
    mine = torch.tensor([peak_memory.peak(), peak_memory.peak() - before]) / 2**20
    peaks = [torch.zeros(2) for _ in range(run.ranks)]
    dist.all_gather(peaks, mine)
    if run.rank:
        return
    cfg = run.cfg
    plan = ra.make_plan(
        "Causal()", tokens=cfg.tokens, ranks=cfg.cp, layout=cfg.layout, schedule=cfg.schedule, heads=cfg.model.heads,
        kv_heads=cfg.model.kv_heads, head_dim=cfg.model.width // cfg.model.heads, dtype="float32",
    )  # fmt: skip
    modelled = ra.simulate(plan, "cpu", backward=True)
    calls = cfg.model.layers * cfg.rows // cfg.dp  # each rank runs them one after another
    speed = median(run.speeds)
    step = cfg.rows * cfg.tokens / speed
    print(f"measured in {run.folder}: {speed:,.0f} tokens/s, {step * 1e3:.0f} ms a step, median of", end=" ")
    print(f"{len(run.speeds)} steps on dp={cfg.dp} cp={cfg.cp}; peak memory", end=" ")
    print(", ".join(f"{float(x):.0f} MiB on rank {i} ({float(y):.1f} by steps)" for i, (x, y) in enumerate(peaks)))
    attention, memory = calls * modelled.seconds * 1e3, sum(modelled.memory.values()) / 2**20
    print(
        f"modelled by ra.simulate on preset cpu: causal attention takes {attention:.0f} ms of a step, "
        f"and {memory:.1f} MiB on a rank in each layer"
    )


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # After a restart by torchrun, the store still has the addresses of the earlier ranks: see docs/launching.md.
    store, rank, ranks = next(dist.rendezvous("env://"))
    # The store keeps the folder's name for all ranks and restarts.
    folder = f"outputs/train_lm/{time.strftime('%Y-%m-%d_%H-%M-%S')}_dp{cfg.dp}_cp{cfg.cp}"
    cfg.output = cfg.output or store.compare_set("output", "", folder).decode()
    store = dist.PrefixStore(f"restart_{RESTARTS}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        train(cfg)
    except ra.InvalidInput as error:
        sys.exit(f"error: {error}")
    # Free DDP before its group is destroyed. If it held the last reference, it would hold Python's lock while waiting
    # for a Gloo thread that waits for the same lock: https://github.com/pytorch/pytorch/issues/56297
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def train(cfg: DictConfig) -> None:
    """Train from the start, or from the last checkpoint of a resumed run, to the last step."""
    run = Run(cfg)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.load()
    if run.rank == 0:
        keep_lines(run.folder / "losses.jsonl", run.step)
        begins = f"continued at step {run.step}" if run.step else "from step 0"
        print(f"{run.folder}: dp={cfg.dp} cp={cfg.cp}, {begins}", flush=True)
    log = log_to(cfg.log if run.rank == 0 else None, run)
    killed = run.folder / "killed"
    before = peak_memory.resident()
    while run.step < cfg.steps:
        if run.step == cfg.kill_at and run.rank == run.ranks - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.perf_counter()
        line: dict[str, Any] = {"loss": run.train(), "ranks": f"dp={cfg.dp} cp={cfg.cp}"}
        line |= {"step": run.step, "tokens_per_second": cfg.rows * cfg.tokens / (time.perf_counter() - began)}
        if run.step % cfg.evaluate_every == 0 or run.step == cfg.steps:
            line["held_out"] = run.evaluate()
        if run.rank == 0:
            run.report(line)
            log({name: number for name, number in line.items() if isinstance(number, float)}, step=run.step)
        if run.step % cfg.checkpoint_every == 0 or run.step == cfg.steps:
            run.save()
    compare(run, before)
    if run.rank == 0:
        plot(run)


if __name__ == "__main__":
    main()
