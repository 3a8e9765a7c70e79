"""The smallest failing case as a script without this library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from . import models
from .cases import Case
from .judge import place_rows
from .oracle import see

#: How every script begins and ends. Its work is a function, so that no graph keeps the process group after its
#: destruction: Gloo's threads would hold tensors while Python ends, which aborts.
BEGIN = """# {feature}: torchrun --nproc-per-node {ranks} this.py
import torch, torch.distributed as dist
{target}
def main(group):
    rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), torch.{dtype}
"""
END = """dist.init_process_group("gloo")
main(dist.group.WORLD)
dist.barrier()
dist.destroy_process_group()
"""
SCRIPT = """    torch.manual_seed(0)
    q, grad = torch.randn(2, {batch}, {heads}, {tokens}, {head_dim}).to(dtype).double()
    k, v = torch.randn(2, {batch}, {kv_heads}, {tokens}, {head_dim}).to(dtype).double()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    seen = torch.tensor({seen}).bool()  # queries x keys
    scores = (q @ k.repeat_interleave({group}, 1).mT * {scale}){softcap}.masked_fill(~seen, -torch.inf)
    exact = scores.softmax(-1).nan_to_num(0.0) @ v.repeat_interleave({group}, 1)
    exact = [exact, *torch.autograd.grad(exact, (q, k, v), grad)]
    rows = torch.tensor({rows}[rank])
    mine = [x[:, :, rows].detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = {function}(*mine, group=group{keywords})
    out = out[0] if isinstance(out, tuple) else out
    found = [out, *torch.autograd.grad(out, mine, grad[:, :, rows].to(dtype))]
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, exact):
        print(f"rank {{rank}} {{name}}: largest error {{(x.double() - y[:, :, rows]).abs().max():.1e}}")
"""
MODEL = """    torch.manual_seed(1)
    model = {model}.eval().to(dtype)
    state = {{name: x.clone() for name, x in model.state_dict().items()}}
    batch = {inputs}
    ids = torch.tensor(batch["input_ids"])
    rows = torch.tensor({rows}[rank])
    out = {function}(model, {{name: torch.tensor(x) for name, x in batch.items()}}, group=group)
    out = getattr(out, "logits", out).double()
    torch.manual_seed(1)
    alone = {model}.eval()
    alone.load_state_dict(state)
    alone.double().set_attn_implementation("eager")
    for a, b in {spans}:
        exact, seen = alone(ids[:, a:b], use_cache=False).logits, (rows >= a) & (rows < b)
        error = (out[:, seen] - exact[:, rows[seen] - a]).abs()
        print(f"rank {{rank}} tokens {{a}} .. {{b - 1}}: largest error {{error.max() if error.numel() else 0:.1e}}")
"""
SIZES = ("feature", "batch", "heads", "kv_heads", "tokens", "head_dim", "dtype")


def write_script(target: Callable[..., Any], name: str, case: Case, ranks: int, model: str | None = None) -> str:
    """A script that shows the failure of a case; "" if that lies in how the target is called, or in dropout."""
    if case.ways or case.mask.get("dropout") or case.mask.get("sink_logits"):
        return ""
    module, named, function = name.partition(":")
    if named:
        source = f"from {module} import {function}"
    else:
        source, function = inspect.getsource(inspect.getmodule(target) or inspect), target.__name__
        source = source[source.index("from typing") :].strip()  # after the docstring and the future
    known: dict[str, Any] = {
        **{name: getattr(case, name) for name in SIZES},
        "ranks": ranks,
        "function": function,
        "rows": [place_rows(target, case.tokens, rank, ranks).tolist() for rank in range(ranks)],
    }
    if model is not None:
        more, made = models.spell(model)
        batch = {name: x.tolist() for name, x in models.make_batch(case).items()}
        spans = models.find_spans(case)
        return (BEGIN + MODEL + END).format(**known, target=f"{source}\n{more}", model=made, inputs=batch, spans=spans)
    cap = case.mask.get("softcap")
    return (BEGIN + SCRIPT + END).format(
        **known,
        target=source,
        group=case.heads // case.kv_heads,
        scale=case.mask.get("scale") or f"{case.head_dim} ** -0.5",
        softcap=f".div({cap}).tanh().mul({cap})" if cap else "",
        seen=see(case).int().tolist(),
        keywords="".join(f", {key}={value!r}" for key, value in case.mask.items()),
    )
