"""The smallest failing case as a script without this library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .cases import Case
from .judge import place_rows
from .models import Tested, find_spans, make_batch
from .oracle import see

#: How every script begins and ends. Its work is a function, so that no graph keeps the process group after its
#: destruction: Gloo's threads would hold tensors while Python ends, which aborts.
BEGIN = """# {feature}: torchrun --nproc-per-node {ranks} this.py
import copy, torch, torch.distributed as dist
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
    grad[:, :, :{first}] = grad[:, :, {end}:] = 0
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
        error = (x.double() - y[:, :, rows])[:, :, (rows >= {first}) & (rows < {end})].abs()
        print(f"rank {{rank}} {{name}}: largest error {{error.max() if error.numel() else 0:.1e}}")
"""
MODEL = """    torch.manual_seed(1)
    model = {model}.eval().to(dtype)
    for x in model.state_dict().values():
        dist.broadcast(x, 0)
    alone = copy.deepcopy(model).double()
    alone.set_attn_implementation("eager")
    batch = {{name: torch.tensor(x) for name, x in {inputs}.items()}}
    ids, rows = batch["input_ids"], torch.tensor({rows}[rank])
    exact = torch.cat([alone(ids[:, a:b], use_cache=False).logits for a, b in {spans}], 1)
    exact = torch.nn.functional.pad(exact, (0, 0, {first}, {padding}))
    torch.manual_seed(0)
    grad = torch.randn(exact.shape).double()
    grad[:, :{first}] = grad[:, {end}:] = 0
    out = {function}(model, batch, group=group)
    out = getattr(out, "logits", out).double()
    (exact * grad).sum().backward()
    (out * grad[:, rows]).sum().backward()
    real = (rows >= {first}) & (rows < {end})
    error = (out - exact[:, rows])[:, real].abs()
    print(f"rank {{rank}} logits: largest error {{error.max() if error.numel() else 0:.1e}}")
    worst = 0.0
    for x, y in zip(model.parameters(), alone.parameters()):
        if x.requires_grad:
            x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            dist.all_reduce(x.grad)
            worst = max(worst, float((x.grad - y.grad).abs().max()))
    print(f"rank {{rank}} gradients: largest error {{worst:.1e}}")
"""


def write_script(target: Callable[..., Any], name: str, case: Case, ranks: int, tested: Tested | None) -> str:
    """A short script that shows the failure of a case; "" for cases that a script cannot show.

    These are cases with `Case.ways`, dropout or sink logits. `tested` is the model of the case, if it has one. Not
    collective: only rank 0 writes the script.
    """
    if case.ways or case.mask.get("dropout") or case.mask.get("sink_logits"):
        return ""
    module, named, function = name.partition(":")
    if named:
        source = f"from {module} import {function}"
    else:
        source, function = inspect.getsource(inspect.getmodule(target) or inspect), target.__name__
        source = source[source.index("from typing") :].strip()  # after the docstring and the future
    (first, end), keywords, cap = case.real, {**case.mask}, case.mask.get("softcap")
    if keywords.pop("left", 0) + keywords.pop("padding", 0):
        keywords["padding_mask"] = f"((rows < {first}) | (rows >= {end})).expand({case.batch}, -1)"
    known: dict[str, Any] = {
        **vars(case),
        **{"ranks": ranks, "target": source, "function": function, "first": first, "end": end},
        "rows": [place_rows(target, case.tokens, rank, ranks).tolist() for rank in range(ranks)],
        "group": case.heads // case.kv_heads,
        "scale": case.mask.get("scale") or f"{case.head_dim} ** -0.5",
        "softcap": f".div({cap}).tanh().mul({cap})" if cap else "",
        "seen": see(case).int().tolist(),
        "keywords": "".join(f", {key}={value}" for key, value in keywords.items()),
    }
    if tested is None:
        return (BEGIN + SCRIPT + END).format(**known)
    imported, made = tested.source
    batch = {name: x.tolist() for name, x in make_batch(case, tested.words).items()}
    known |= {"target": f"{source}\n{imported}", "model": made, "inputs": batch, "spans": find_spans(case)}
    return (BEGIN + MODEL + END).format(**known, padding=case.tokens - end)
