"""Fine-tune a Hugging Face causal language model with the Trainer on dp x cp ranks.

    torchrun --nproc-per-node 4 examples/hf_finetune/finetune.py --dp 2 --cp 2
    torchrun --nproc-per-node 2 examples/hf_finetune/finetune.py --cp 2 --model mistralai/Mistral-7B-v0.3

Without --model a tiny Mistral with random weights learns the topics of Python's help, byte by byte.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainingArguments,
)

from ringattn.integrations.transformers import Collator, check, parallelize


class Topics(Dataset):
    """One topic of Python's help per example, cut to `longest` tokens."""

    def __init__(self, tokenize, longest: int) -> None:
        topics = pydoc_data.topics.topics
        self.examples = [tokenize(topics[name])[:longest] for name in sorted(topics)]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.examples[index]}


class RingTrainer(Trainer):
    """A Trainer whose cp ranks get the same examples, which its collator cuts; the dp groups share the data."""

    mesh = None

    def _loader(self, dataset: Dataset, size: int, *, shuffle: bool) -> DataLoader:
        dp = self.mesh["dp"]
        sampler = DistributedSampler(
            dataset, dp.size(), dp.get_local_rank(), shuffle=shuffle, seed=self.args.seed, drop_last=True
        )
        return DataLoader(dataset, size, sampler=sampler, collate_fn=self.data_collator, drop_last=True)

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        return self._loader(eval_dataset or self.eval_dataset, self.args.per_device_eval_batch_size, shuffle=False)


def make_model(name: str | None):
    """(model, function from text to tokens)."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), lambda text: tokenizer(text)["input_ids"]
    config = MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=128,
    )  # fmt: skip
    torch.manual_seed(0)
    return MistralForCausalLM(config), lambda text: list(text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=4, help="examples of a step, packed into one sequence per dp group")
    parser.add_argument("--longest", type=int, default=512, help="tokens of an example")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--model", default=None)
    parser.add_argument("--layout", default="zigzag")
    parser.add_argument("--output", default="outputs/hf_finetune")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (options.dp, options.cp), mesh_dim_names=("dp", "cp"))
    model, tokenize = make_model(options.model)
    parallelize(model, mesh["cp"], layout=options.layout)
    if options.model is None:
        print(check(model, tokens=200))
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows // options.dp // options.accumulate,
        per_device_eval_batch_size=options.rows // options.dp,
        gradient_accumulation_steps=options.accumulate,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    RingTrainer.mesh = mesh
    data = Topics(tokenize, options.longest)
    collator = Collator(DataCollatorWithFlattening(), mesh["cp"], options.layout)
    trainer = RingTrainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(8)),
    )
    trainer.train()
    print(trainer.evaluate())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
