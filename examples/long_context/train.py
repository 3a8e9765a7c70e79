"""Train a model with sliding windows on packed documents, one sequence over all ranks. Run it again to continue.

    torchrun --nproc-per-node 8 examples/long_context/train.py --model google/gemma-3-1b-pt --tokens 1M  # eight GPUs
    torchrun --nproc-per-node 2 examples/long_context/train.py                                  # two CPU processes

Without --model, a tiny Gemma 3 with random weights learns the sources of Python's standard library, byte by byte.
Except for rounding, losses do not depend on the number of ranks.
"""

import argparse
import os
import random
import sysconfig
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import ringattn as ra
from ringattn.cli.config.schema import parse_size
from ringattn.integrations.transformers import parallelize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a model of Hugging Face, or a folder; default: a tiny Gemma 3")
parser.add_argument("--texts", type=Path, default=sysconfig.get_path("stdlib"), help="a folder of documents, *.py")
parser.add_argument("--tokens", type=parse_size, default="4k", help="tokens of a step, all in one sequence")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=10, help="evaluate and save in every such step")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--output", type=Path, default="outputs/long_context")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()  # NCCL for CUDA, Gloo for CPUs

if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    encode = AutoTokenizer.from_pretrained(options.model).encode
else:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 256}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model, encode = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, layer_types=kinds)), str  # bytes of text

model.gradient_checkpointing_enable({"use_reentrant": False})
parallelize(model, layout="balanced", whole=True, loss="chunked")
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device == "cuda" else MixedPrecisionPolicy()
for part in [*model.model.layers, model]:
    fully_shard(part, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), options.lr)

files = sorted(options.texts.glob("*.py"))
random.Random(0).shuffle(files)
held_out, texts = (
    ra.train.pack((file.read_text(errors="ignore") for file in cycle(some)), options.tokens, encode, device=device)
    for some in (files[:10], files[10:])
)
unseen = next(held_out)


@torch.no_grad()
def evaluate():
    return model(**unseen, use_cache=False).loss


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "texts": texts, "log": log}


log = ra.train.Log(options.output, options.tokens, held_out=evaluate, every=options.every)
saved = sorted(options.output.glob("step_*/.metadata"))
if saved:
    last = state()
    dcp.load(last, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=last["model"], optim_state_dict=last["optimizer"])

while log.step < options.steps:
    loss = model(**next(texts), use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(loss)
    if log.step % options.every == 0 or log.step == options.steps:
        dcp.save(state(), checkpoint_id=options.output / f"step_{log.step:06}")
dist.destroy_process_group()
