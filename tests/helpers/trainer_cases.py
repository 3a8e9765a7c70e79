"""Runs of trainers on ranks and on one process, which tests and people compare."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from rank_pool import told_by
from torch.utils.data import IterableDataset

from ringattn.integrations.trainer import RingAccelerator, RingMixin, RingTrainer
from ringattn.integrations.transformers import LayerMasks, parallelize, unparallelize

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
SIZES = dict(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, head_dim=8,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.5)


def make_model(kind: str = "MistralForCausalLM", **changes: Any) -> Any:
    """A tiny model with the same random weights in every process."""
    torch.manual_seed(0)
    model = getattr(hf, kind)
    return model(model.config_class(**{**SIZES, "sliding_window": 16, **changes})).float()


def make_lora() -> LoraConfig:
    """Adapters whose second factor is not zero, and a head that is trained."""
    return LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False
    )  # fmt: skip


def make_tokenizer() -> Any:
    """A tokenizer of one number per letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "?", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="?")
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_text(seed: int, shortest: int = 5, longest: int = 45) -> str:
    numbers = random.Random(seed)
    return "".join(numbers.choice(LETTERS) for _ in range(numbers.randint(shortest, longest)))


def make_rows(count: int) -> list[dict[str, list[int]]]:
    tokenizer = make_tokenizer()
    return [{"input_ids": tokenizer(make_text(i))["input_ids"]} for i in range(count)]


class Stream(IterableDataset[Any]):
    """Rows without a length; `alone`: only rank 0 may read it."""

    def __init__(self, rows: list[Any], alone: bool) -> None:
        self.rows, self.alone = rows, alone

    def __iter__(self) -> Iterator[Any]:
        assert not self.alone or not dist.is_initialized() or dist.get_rank() == 0
        yield from self.rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch, with labels."""
    most = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (most - len(row["input_ids"])) for row in rows])
    mask = (torch.arange(most) < torch.tensor([[len(row["input_ids"])] for row in rows])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def options(folder: str, steps: int, rows: int, dp: int, accumulate: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a trainer whose steps have `rows` rows on each number of groups."""
    return dict(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=rows // dp // accumulate,
        per_device_eval_batch_size=rows // dp, gradient_accumulation_steps=accumulate, learning_rate=3e-3,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, bf16=False,
        dataloader_pin_memory=False, dataloader_drop_last=True, seed=3, **changes,
    )  # fmt: skip


class FsdpTrainer(RingTrainer):
    """A RingTrainer whose FSDP2 also runs on CPUs, where accelerate ignores its plugin."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def train_plain(
    folder: str, dp: int, cp: int, steps: int, accumulate: int = 1, data: str = "rows", resume: bool = False,
    lora: bool = False, hybrid: bool = False, fsdp: bool = False,
) -> Any:  # fmt: skip
    """The Trainer of transformers. data: rows, stream, or dispatch; resume: from a checkpoint in the middle; fsdp: on
    ranks, with a loss in chunks.
    """
    fsdp = fsdp and dist.is_initialized()
    kind, ring = (FsdpTrainer, {"loss": "chunked"}) if fsdp else (RingTrainer, {})
    rows = make_rows(40)
    source = rows if data == "rows" else Stream(rows, data == "dispatch")
    more: dict[str, Any] = {"include_num_input_tokens_seen": "non_padding", "fsdp": fsdp}
    if data == "dispatch":
        more["accelerator_config"] = {"dispatch_batches": True}
    if resume:
        more |= {"save_strategy": "steps", "save_steps": steps // 2}

    def make() -> Any:
        args = hf.TrainingArguments(**{**options(folder, steps, 4, dp, accumulate), **more})
        lists = {"train_dataset": source, "eval_dataset": make_rows(8), "data_collator": pad}
        model = make_model("Qwen3NextForCausalLM", **HYBRID) if hybrid else make_model()
        model = get_peft_model(model, make_lora()) if lora else model
        return kind(model, args, cp=cp, compute_metrics=count_right, ring=ring, **lists)

    trainer = make()
    trainer.train()
    if resume:
        trainer = make()
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
    trainer.evaluate()
    model = unparallelize(trainer.model_wrapped).eval()
    with torch.no_grad():
        alone = model(input_ids=torch.arange(20)[None], use_cache=False).logits
    trainer.state.log_history.append({"after": float(alone.square().sum())})
    return trainer


def count_right(found: hf.EvalPrediction) -> dict[str, float]:
    """A metric of whole rows of logits."""
    labels, logits = found.label_ids[:, 1:], found.predictions[:, :-1]
    return {
        "right": float((logits.argmax(-1) == labels)[labels != -100].mean()),
        "sum": float(abs(logits)[labels != -100].sum()),
    }


def train_trl(
    name: str, rows: list[dict[str, str]], model: Any, cp: int, settings: dict[str, Any], lora: bool = False,
    evaluate: bool = True, **more: Any,
) -> Any:  # fmt: skip
    """The trainer of TRL with this name."""
    import trl

    if lora:
        more["peft_config"] = make_lora()
    data, kind = datasets.Dataset.from_list(rows), getattr(trl, f"{name}Trainer")
    if evaluate:
        more["eval_dataset"] = data.select(range(8))
    trainer = type(f"Ring{name}Trainer", (RingMixin, kind), {})(
        model, args=getattr(trl, f"{name}Config")(**settings), cp=cp, train_dataset=data,
        processing_class=make_tokenizer(), **more,
    )  # fmt: skip
    trainer.train()
    if evaluate:
        trainer.evaluate()
    return trainer


def train_sft(
    folder: str, dp: int, cp: int, steps: int, accumulate: int = 1, lora: bool = False, family: str = "",
    **changes: Any,
) -> Any:  # fmt: skip
    """family: "experts", whose loss of routers is a large part of the loss, or "hybrid"."""
    more = {"experts": ("Qwen3MoeForCausalLM", EXPERTS), "hybrid": ("Qwen3NextForCausalLM", HYBRID)}
    name, sizes = more.get(family, ("MistralForCausalLM", {}))
    model = make_model(name, **sizes)
    settings = options(folder, steps, 4, dp, accumulate, include_num_input_tokens_seen="all", **changes)
    rows = [{"text": make_text(i)} for i in range(60)]
    return train_trl("SFT", rows, model, cp, settings, lora, layout="auto" if accumulate > 1 else "balanced")


def make_pairs(count: int) -> list[dict[str, str]]:
    return [{"chosen": make_text(i + 100), "rejected": make_text(i + 200)} for i in range(count)]


def train_dpo(folder: str, dp: int, cp: int, steps: int, lora: bool = False) -> Any:
    rows = [{"prompt": make_text(i), **pair} for i, pair in enumerate(make_pairs(40))]
    reference = None if lora else make_model()
    return train_trl("DPO", rows, make_model(), cp, options(folder, steps, 4, dp, 1), lora, ref_model=reference)


def train_reward(folder: str, dp: int, cp: int, steps: int) -> Any:
    model = make_model("LlamaForSequenceClassification", num_labels=1)
    return train_trl("Reward", make_pairs(40), model, cp, options(folder, steps, 4, dp, 1))


def reward(completions: list[str], **unused: Any) -> list[float]:
    """How many letters of a completion are vowels; more for every second one, so that equal ones differ."""
    return [sum(letter in "aeiou" for letter in text) / 4 + i % 2 for i, text in enumerate(completions)]


def train_grpo(folder: str, dp: int, cp: int, steps: int, lora: bool = False, name: str = "GRPO") -> Any:
    """GRPO or RLOO, with completions of the model itself."""
    settings = {**options(folder, steps, 8, dp, 2), "num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    path = f"{folder}/model"  # TRL loads the reference model anew
    make_model().save_pretrained(path)  # only rank 0 does
    if dist.is_initialized():
        dist.barrier()
    rows = [{"prompt": make_text(i)} for i in range(24)]
    return train_trl(name, rows, path, cp, settings, lora, evaluate=False, reward_funcs=reward)


def pad_labelled(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch with one label a sequence."""
    batch = pad(rows)
    return {**batch, "labels": batch["input_ids"][:, 0] % 3}


def train_classes(folder: str, dp: int, cp: int, steps: int, accumulate: int = 1, single: bool = True) -> Any:
    """The Trainer of transformers, for classes of sequences, or a number for each."""
    args = hf.TrainingArguments(**options(folder, steps, 4, dp, accumulate))
    model = make_model("LlamaForSequenceClassification", num_labels=3 if single else 1)
    data = {"train_dataset": make_rows(40), "eval_dataset": make_rows(8)}
    trainer = RingTrainer(model, args, cp=cp, data_collator=pad_labelled if single else pad_numbered, **data)
    trainer.train()
    trainer.evaluate()
    return trainer


def pad_numbered(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch with one number a sequence."""
    batch = pad_labelled(rows)
    return {**batch, "labels": batch["labels"].float()}


def train_loop(folder: str, dp: int, cp: int, steps: int, classes: bool = False) -> Any:
    """A loop with accelerate."""
    accelerator = RingAccelerator(cpu=True, cp=cp, gradient_accumulation_steps=2)
    model = make_model("LlamaForSequenceClassification", num_labels=3) if classes else make_model()
    if accelerator.mesh is not None:
        parallelize(model, accelerator.mesh["cp"], layout="zigzag", whole=True)
    loader = torch.utils.data.DataLoader(make_rows(8 * steps), 4 // dp, collate_fn=pad_labelled if classes else pad)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 3e-3), loader)
    log = []
    for batch in loader:
        with accelerator.accumulate(model):
            labels = accelerator.reduce((batch["labels"][..., not classes :] != -100).sum())
            loss = model(**batch, num_items_in_batch=labels / accelerator.num_processes).loss
            accelerator.backward(loss)
            line = {"loss": accelerator.gather(loss.detach()).mean().item(), "num_tokens": int(labels)}
            if accelerator.sync_gradients:
                line["grad_norm"] = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        log.append(line)
    return log


#: The numbers of a log that must not depend on the ranks.
KEYS = (
    *("loss", "grad_norm", "eval_loss", "eval_right", "eval_sum", "after", "num_input_tokens_seen", "num_tokens"),
    *("mean_token_accuracy", "entropy", "reward", "completions/mean_length", "mean_reward", "aux_loss"),
)


@contextmanager
def process_of(rank: int) -> Iterator[None]:
    """The environment of torchrun, which accelerate reads; the group is there already."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.is_initialized():
            ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), rank)
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), dist.get_world_size())
            for name, value in {**ranks, **sizes, "OMP_NUM_THREADS": 1, "MASTER_PORT": 1}.items():
                patch.setenv(name, str(value))
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def run(rank: int, kind: str, folder: str, dp: int, cp: int, **changes: Any) -> dict[str, list[float]]:
    """The numbers of a run, by their names in the trainer's log."""
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with process_of(rank):
        trainer = globals()[f"train_{kind}"](folder, dp, cp, **changes)
    log = trainer if isinstance(trainer, list) else trainer.state.log_history
    return {key: found for key in KEYS if (found := [line[key] for line in log if key in line])}


def run_all(rank: int, cases: list[tuple[str, dict[str, Any]]], folder: str, dp: int, cp: int) -> list[dict[str, Any]]:
    """`run` of each case."""
    return [run(rank, kind, f"{folder}/{i}", dp, cp, **changes) for i, (kind, changes) in enumerate(cases)]


def refusals(rank: int, folder: str) -> list[str]:
    """What is said to programs that would be wrong."""

    def make(args: dict[str, Any], cp: int = 2) -> str:
        with process_of(rank):
            settings = hf.TrainingArguments(**{**options(folder, 1, 4, 1, 1), **args})
            return told_by(lambda: RingTrainer(make_model(), settings, cp=cp, train_dataset=make_rows(4)))

    with process_of(rank):
        own = told_by(lambda: RingAccelerator(cpu=True, cp=3))
        model = parallelize(make_model("MixtralForCausalLM"), layout="zigzag", whole=True)
        ids = torch.ones(1, 8, dtype=torch.long)
        calls = ({"output_attentions": True}, {"logits_to_keep": ids[0]}, {"labels": ids, "logits_to_keep": 1})
        said = [told_by(lambda: model(input_ids=ids, **call)) for call in calls]
        said.append(told_by(lambda: model(inputs_embeds=torch.ones(1, 8, 32))))
        said.append(told_by(lambda: model(input_ids=ids + rank)))
    wrong = ({"train_sampling_strategy": "batch_rebalance"}, {"torch_compile": True})
    return [make({}, cp=3), *map(make, wrong), own, *said]


def rows_of_logits(rank: int, balanced: bool) -> tuple[float, float, float]:
    """How far logits and gradients of the last rows of a call with whole sequences are from those of one process."""
    ids = torch.randint(32, (2, 19), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2))
    alone, model = make_model(), make_model()
    parallelize(model, layout=LayerMasks.of(model) if balanced else "zigzag", whole=True)
    found, expected = (m(ids, logits_to_keep=7, output_hidden_states=False).logits for m in (model, alone))
    states = [m(ids, output_hidden_states=True).hidden_states[-1] for m in (model, alone)]
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # DDP takes the mean
        p.grad /= dist.get_world_size()
    gradients = [
        float((a.grad - b.grad).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    return float((found - expected).abs().max()), max(gradients), float((states[0] - states[1]).abs().max())


def dropped_units(rank: int) -> tuple[list[bool], float]:
    """Which units of its first row a rank drops in two calls in training, and the number that it draws after these."""
    model = parallelize(make_model("GPT2LMHeadModel", n_layer=1, n_head=4, n_embd=32), layout="zigzag", whole=True)
    model.train()
    dropped: list[bool] = []
    model.transformer.drop.register_forward_hook(lambda m, x, out: dropped.extend((out[0, 0] == 0).tolist()))
    torch.manual_seed(3)
    for _ in range(2):
        ids = torch.ones(1, 7, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
    return dropped, float(torch.rand(()))
