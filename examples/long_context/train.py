"""Train a model with sliding windows on packed documents, one sequence over all ranks. Run it again to continue.

    torchrun --nproc-per-node 8 examples/long_context/train.py --model google/gemma-3-1b-pt --tokens 1M  # eight GPUs
    torchrun --nproc-per-node 2 examples/long_context/train.py                                  # two CPU processes

Without --model, a tiny Gemma 3 with random weights learns the sources of Python's standard library, byte by byte.
Except for rounding, losses do not depend on the number of ranks.
"""

import random
import sysconfig
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import cycle
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

import ringattn as ra
from ringattn.cli.config.schema import parse_size
from ringattn.integrations.transformers import parallelize

parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a model of Hugging Face, or a folder; default: a tiny Gemma 3")
parser.add_argument("--texts", type=Path, default=sysconfig.get_path("stdlib"), help="a folder of documents, *.py")
parser.add_argument("--tokens", type=parse_size, default="4k", help="tokens of a step, all in one sequence")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--every", type=int, default=10, help="evaluate and save in every such step")
parser.add_argument("--output", type=Path, default="outputs/long_context")
options = parser.parse_args()

device, encode = ra.train.start(), str  # the bytes of a text
if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    encode = AutoTokenizer.from_pretrained(options.model).encode
else:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 16}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 256, "layer_types": kinds}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads))
parallelize(model, layout="balanced", whole=True, loss="chunked")
ra.train.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

files = sorted(options.texts.glob("*.py"))
if len(files) < 11:
    parser.error(f"--texts {options.texts}: needs 11 files *.py, ten of them held out")
random.Random(0).shuffle(files)
texts = ra.train.pack(cycle(files[10:]), options.tokens, encode, device=device)
unseen = next(ra.train.pack(cycle(files[:10]), options.tokens, encode, device=device))
log = ra.train.Log(options.output, options.tokens, held_out=lambda: model(**unseen).loss, every=options.every)
saved = ra.train.Checkpoints(options.output, model, optimizer, texts=texts, log=log)
saved.load()

while log.step < options.steps:
    loss = model(**next(texts)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    log(loss)
    if log.step % options.every == 0 or log.step == options.steps:
        saved.save(log.step)
torch.distributed.destroy_process_group()
