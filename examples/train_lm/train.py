"""Train a byte-level language model on dp x cp ranks, with checkpoints that any number of ranks can continue.

    torchrun --nproc-per-node 4 --max-restarts 1 examples/train_lm/train.py dp=2 cp=2

The losses do not depend on the number of ranks, but for rounding.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import hydra
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ringattn as ra
from ringattn.train import NO_LABEL, count_labels, linear_cross_entropy, mean_over_ranks

sys.path.insert(0, str(Path(__file__).parent))
from model import Decoder
from text import Text, shift


class Run:
    """A training run on this rank: model, optimizer, and the files of the run."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg, self.folder = cfg, Path(cfg.output)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if cfg.dp * cfg.cp != self.ranks or cfg.rows % cfg.dp:
            raise ra.InvalidInput(
                f"dp={cfg.dp} cp={cfg.cp} rows={cfg.rows}: dp * cp must be the {self.ranks} ranks of torchrun "
                "(--nproc-per-node), and rows a multiple of dp"
            )
        mesh = init_device_mesh("cpu", (cfg.dp, cfg.cp), mesh_dim_names=("dp", "cp"))
        self.dp, self.cp = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
        place = {"group": mesh["cp"].get_group(), "layout": cfg.layout, "schedule": cfg.schedule}
        torch.manual_seed(cfg.seed)  # every rank makes the same model
        self.layout = ra.make_layout(cfg.layout, tokens=cfg.tokens, ranks=cfg.cp)
        self.text = Text(cfg.tokens, cfg.seed)
        # Gradients are averaged over all dp * cp ranks, which linear_cross_entropy expects of its group.
        self.model = DistributedDataParallel(Decoder(**cfg.model, place=place))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
        self.step = 0

    def load(self) -> None:
        """Continue from the last checkpoint of the folder, whatever the number of ranks that wrote it."""
        checkpoints = sorted(self.folder.glob("step_*"))
        if checkpoints:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
            dcp.load(state, checkpoint_id=checkpoints[-1])
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            self.step = int(state["step"])
        dist.barrier()

    def save(self) -> None:
        """Write a checkpoint under another name, and rename it when it is whole."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        unfinished = self.folder / f"unfinished_{self.step:06d}"
        state = {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}
        dcp.save(state, checkpoint_id=unfinished)
        if self.rank == 0:
            unfinished.rename(self.folder / f"step_{self.step:06d}")
        dist.barrier()

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor, ra.Documents]]:
        """(ids, labels, documents) of this rank's part of each row of the step that this dp group computes."""
        found = []
        for row in range(self.dp, self.cfg.rows, self.cfg.dp):
            ids, lengths = self.text.row(self.step, row)
            labels = shift(ids, lengths, NO_LABEL)
            local = [self.layout.shard_tensor(x, self.cp, dim=1) for x in (ids, labels)]
            found.append((*local, ra.Documents(lengths)))
        return found

    def train(self) -> float:
        """One step; returns its loss, the mean over all labels of all rows."""
        batches = self.batches()
        total = count_labels(torch.cat([labels for _, labels, _ in batches], 1))
        positions = torch.from_numpy(self.layout.positions(self.cp))
        result = torch.zeros(())
        for number, (ids, labels, documents) in enumerate(batches):
            last = number == len(batches) - 1
            self.model.require_backward_grad_sync = last  # gradients are averaged once a step
            hidden = self.model(ids, positions, documents)
            weight = self.model.module.embedding.weight
            loss = linear_cross_entropy(hidden, weight, labels, total=total)
            loss.backward()
            result += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.lr * min(1.0, (self.step + 1) / self.cfg.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(mean_over_ranks(result))

    def report(self, loss: float, seconds: float) -> None:
        """Append a line to losses.jsonl, and show it."""
        speed = self.cfg.rows * self.cfg.tokens / seconds
        with (self.folder / "losses.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "loss": loss, "tokens_per_second": speed}) + "\n")
        print(f"step {self.step:4d}/{self.cfg.steps}  loss {loss:.4f}  {speed:,.0f} tokens/s", flush=True)


def keep_lines(path: Path, step: int) -> list[dict]:
    """The lines of losses.jsonl up to a step; later lines, of a run that died, are dropped from the file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [line for line in lines if line["step"] <= step]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return kept


def plot(folder: Path) -> None:
    """Draw losses.jsonl as loss.png."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: pip install 'ringattn[plot]' for loss.png")
        return
    lines = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([line["step"] for line in lines], [line["loss"] / 0.6931471805599453 for line in lines])
    axes.set(xlabel="step", ylabel="bits per byte", title="Topics of Python's help")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=150)


def compare_memory(run: Run) -> None:
    """Print the measured peak of each rank, beside the modelled memory of the attention of one layer."""
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    peaks = [torch.zeros(()) for _ in range(run.ranks)]
    dist.all_gather(peaks, peak)
    if run.rank:
        return
    cfg = run.cfg
    plan = ra.make_plan(
        "Causal()", tokens=cfg.tokens, ranks=cfg.cp, layout=cfg.layout, schedule=cfg.schedule, heads=cfg.model.heads,
        kv_heads=cfg.model.kv_heads, head_dim=cfg.model.width // cfg.model.heads, dtype="float32",
    )  # fmt: skip
    modelled = sum(ra.simulate(plan, "cpu", backward=True).memory.values()) / 2**20
    print(f"peak memory of each rank, measured: {', '.join(f'{float(x):.0f} MiB' for x in peaks)}")
    print(f"of these the attention of one layer, forward and backward, modelled: {modelled:.1f} MiB")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # After a restart of torchrun the store still says where the earlier ranks listened: see docs/launching.md.
    store, rank, ranks = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("restart_" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    run = Run(cfg)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.load()
    if run.rank == 0:
        keep_lines(run.folder / "losses.jsonl", run.step)
        print(f"dp={cfg.dp} cp={cfg.cp}: {'continued at' if run.step else 'from'} step {run.step}", flush=True)
    killed = run.folder / "killed"
    while run.step < cfg.steps:
        if run.step == cfg.kill_at and run.rank == run.ranks - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.perf_counter()
        loss = run.train()
        if run.rank == 0:
            run.report(loss, time.perf_counter() - began)
        if run.step % cfg.checkpoint_every == 0 or run.step == cfg.steps:
            run.save()
    compare_memory(run)
    if run.rank == 0:
        plot(run.folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
