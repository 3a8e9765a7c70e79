"""Fine-tune a Hugging Face causal language model with the Trainer on dp x cp ranks.

    torchrun --nproc-per-node 4 examples/hf_finetune/finetune.py --dp 2 --cp 2
    torchrun --nproc-per-node 4 examples/hf_finetune/finetune.py --dp 2 --cp 2 --fsdp --accumulate 2
    torchrun --nproc-per-node 2 examples/hf_finetune/finetune.py --cp 2 --model mistralai/Mistral-7B-v0.3
    python examples/hf_finetune/finetune.py  # one process, the attention of transformers

Without --model a tiny Mistral with random weights learns the topics of Python's help, byte by byte. Except for
rounding, losses and gradient norms, in trainer_state.json in --output, do not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import pydoc_data.topics

import torch
import torch.distributed as dist
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    MistralConfig,
    MistralForCausalLM,
    TrainingArguments,
)

from ringattn.integrations.trainer import RingTrainer
from ringattn.integrations.transformers import check


class Topics(Dataset):
    """One topic of Python's help per example, cut to `longest` tokens."""

    def __init__(self, tokenize, longest: int) -> None:
        topics = pydoc_data.topics.topics
        self.examples = [tokenize(topics[name])[:longest] for name in sorted(topics)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.examples[index]}


class FsdpTrainer(RingTrainer):
    """A RingTrainer whose FSDP2 also runs on CPUs, where accelerate ignores its plugin."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def make_model(name: str | None):
    """(model, function that turns text into tokens)."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), lambda text: tokenizer(text)["input_ids"]
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=128,
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config), lambda text: list(text.encode())


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters over all ranks by FSDP2, not DDP")
    parser.add_argument("--rows", type=int, default=4, help="examples per step, packed into one sequence per dp group")
    parser.add_argument("--longest", type=int, default=512, help="most tokens of an example")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step, which divide its rows")
    parser.add_argument(
        "--mean-of-means", action="store_true", help="wrong, for comparison: each rank divides by its own labels"
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--output", default="outputs/hf_finetune")
    options = parser.parse_args(words)
    if options.rows % (options.dp * options.accumulate):
        parser.error(f"--rows {options.rows}: must be a multiple of --dp times --accumulate")
    return options


def train(options: argparse.Namespace) -> RingTrainer:
    """Train and evaluate; the returned Trainer's `state.log_history` has loss and grad_norm of every step."""
    torch.set_num_threads(1)
    model, tokenize = make_model(options.model)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows // options.dp // options.accumulate,
        per_device_eval_batch_size=options.rows // options.dp,
        gradient_accumulation_steps=options.accumulate,
        average_tokens_across_devices=not options.mean_of_means,
        fsdp=options.fsdp,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
        remove_unused_columns=False,
    )
    data = Topics(tokenize, options.longest)
    trainer = (FsdpTrainer if options.fsdp else RingTrainer)(
        model,
        arguments,
        cp=options.cp,
        layout=options.layout,
        data_collator=DataCollatorWithFlattening(),
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(8)),
    )
    if dist.is_initialized() and options.model is None:
        agreement = check(model, tokens=200)
        if dist.get_rank() == 0:
            print(agreement)
    trainer.train()
    trainer.evaluate()
    trainer.save_state()
    return trainer


def main() -> None:
    options = parse()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(options)
    if dist.is_initialized():
        # Free DDP before its group is destroyed. If it held the last reference, it would hold Python's lock while
        # waiting for a Gloo thread that waits for the same lock: https://github.com/pytorch/pytorch/issues/56297
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
