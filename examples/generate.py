"""Answer each line of standard input with a model whose keys and values are sharded over ranks.

    printf 'one\ntwo\n' | torchrun --nproc-per-node 2 examples/generate.py
    torchrun --nproc-per-node 4 examples/generate.py --model Qwen/Qwen3-0.6B --tokens 200 < questions.txt

Without --model a random Llama of two layers answers in bytes. All lines form one conversation: the keys and values of
earlier lines stay where they are.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ringattn.integrations.transformers import RingCache, parallelize


class Bytes:
    """Text as bytes, in place of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1").__repr__()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a causal model on the Hugging Face hub, or a folder with one")
    parser.add_argument("--tokens", type=int, default=20, help="maximum number of new tokens per answer")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/generate.py")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if options.model:
        words, model = AutoTokenizer.from_pretrained(options.model), AutoModelForCausalLM.from_pretrained(options.model)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        words, model = Bytes(), LlamaForCausalLM(LlamaConfig(vocab_size=256, pad_token_id=0, **sizes))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        model = model.to("cuda", torch.bfloat16)
    model = parallelize(model.eval(), layout="zigzag")
    past, told = RingCache(model), torch.empty(1, 0, dtype=torch.long, device=model.device)
    while True:
        line = sys.stdin.readline() if rank == 0 else ""  # only rank 0 has standard input
        prompt = torch.tensor([words.encode(line) if line else []], dtype=torch.long, device=model.device)
        length = torch.tensor(prompt.shape[1], device=model.device)
        dist.broadcast(length, 0)
        if not length:
            break
        prompt = prompt.resize_(1, int(length))
        dist.broadcast(prompt, 0)
        told = torch.cat([told, prompt], 1)
        before = told.shape[1]
        told = model.generate(told, max_new_tokens=options.tokens, past_key_values=past)
        if rank == 0:
            print(words.decode(told[0, before:].tolist()), flush=True)
    if rank == 0:
        print(f"rank 0 of {dist.get_world_size()} holds {past.cache.nbytes:,} bytes of {past.cache.length} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
