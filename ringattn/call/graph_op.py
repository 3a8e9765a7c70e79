"""Attention as operators of torch's graphs: for torch.compile, and for selective checkpoints.

`ringattn::attend` runs one of our functions as without a graph, with its handshake and its errors. It keeps the part of
the autograd graph that the function makes; `ringattn::attend_backward` runs this part backward. The operators take
tensors, the numbers of patterns and layouts, and a text with all other arguments. A new pattern is only a new number,
so torch does not recompile. In the text, a number stands for each object. torch.compile guards the object's identity,
so the object is alive whenever a graph that refers to it starts.

The memory of the operator's third result, the ticket, owns what a forward keeps for its backward. The graph saves the
ticket, so these tensors are freed together with the graph of the call.

torch's effect tokens do not order the operators: in torch 2.13 operators with tokens fail in plain checkpointing. All
ranks run the calls of a graph in program order, which torch's passes preserve; if a pass did not, the handshake would
detect it (`handshake.call_index`), and all ranks would raise Mismatch before the first message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from inspect import unwrap
from itertools import count
from pkgutil import resolve_name
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np
import torch
from torch import Tensor
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..cache import NUMBERED, Cache, Numbered
from ..errors import InvalidInput, Unsupported
from ..kernels.base import wide
from ..pattern import Pattern, parse_pattern
from .arguments import cast_inputs
from .handshake import call_index
from .last import make_last
from .rows import Rows, read_arguments

P = ParamSpec("P")
R = TypeVar("R")
#: Dispatch keys that torch needs to record a graph; torch excludes them while an operator runs.
_K = torch._C.DispatchKey
RECORDING = (_K.AutogradFunctionality, _K.AutogradOther, _K.AutogradNestedTensor, _K.ADInplaceOrView)
#: Functions that return positions, and functions that always return (out, lse or None).
POSITIONS, PAIRS = ".positions", (".attend", ".attend_by")
#: The name of the tensor that holds the seed of a call's dropout.
DRAWN = "drawn"
#: Types of numbers; torch.compile takes a NumPy number for an array.
SCALARS = int, float, np.generic, np.ndarray
#: The names of the tensors of Rows and of their weights start with these; "k" is then `expand`, and "v" other options.
ROWS, WEIGHTS = "row tensor ", "weight "
#: Arguments that may change from call to call of a compiled function, and the prefix of the names of their tensors.
NUMBERS, NUMBER = ("scale", "scaling", "softcap", "dropout"), "number "
#: Objects by their numbers in texts.
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_serials = count()
#: The patterns and layouts that ran last: a checkpoint may run them again after the program has dropped them.
_recent = Cache(1 << 24)
#: The number of calls in each trace of torch.compile so far.
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class _Record(bytearray):
    """The memory of a ticket, with everything that the forward keeps for its backward."""

    leaves: list[Tensor]
    results: list[Tensor]
    #: The tensors that torch saves; an index stands for one of the operator's own tensors, which the graph saves.
    saved: list[Tensor | int]
    #: The operator's own tensors, while the backward runs.
    current: list[Tensor]


#: Records by the address of their memory.
_records: WeakValueDictionary[int, _Record] = WeakValueDictionary()


# What torch.compile traces.


def _constant(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile run `function` while it traces, and guard its arguments: objects by identity."""
    return cast(Callable[P, R], torch.compiler.assume_constant_result(function))


def call_in_graph(name: str, arguments: dict[str, Any]) -> Any:
    """Call the `compilable` function `name`, given as "module:function", as one operator, and return its result."""
    k, v, pattern = arguments["k"], arguments.get("v"), arguments.get("pattern")
    if isinstance(k, Rows) and (v is not None or pattern is not None):  # modules have their own pattern
        k, v, pattern = read_arguments(k, v, pattern)
        arguments = {**arguments, "pattern": pattern}
    q, k, v = cast_inputs(arguments["q"], k, v)
    arguments = {**arguments, "q": q, "k": k, "v": v}
    if isinstance(k, Rows):  # in the graph, its tensors one by one
        arguments |= {f"{ROWS}{i}": x for i, x in enumerate(k.tensors)}
        arguments |= {f"{WEIGHTS}{i}": x for i, x in enumerate(k.weights)}
        arguments |= {"k": k.expand, "v": (k.chunk, k.travel)}
    names, tensors, numbers, constants = [], [], {}, {}
    for argument, value in arguments.items():
        if isinstance(value, Tensor):  # "layout" as the number of a layout, see `context_parallel`
            names.append(argument)
            tensors.append(value)
        elif isinstance(value, Numbered) and value.number:
            numbers[argument] = value.number
        elif argument in NUMBERS and isinstance(value, SCALARS) and not isinstance(value, bool):
            # A number that changes between calls is not a constant, and `_write` takes constants only.
            names.append(NUMBER + argument)
            make, value = (torch.tensor, float(value)) if isinstance(value, int | float) else (torch.as_tensor, value)
            tensors.append(make(value, dtype=torch.float64, device="cpu"))
        else:
            constants[argument] = _spell(value) if isinstance(value, Pattern) else value
    if _drops(arguments):
        # torch.compile sees this draw, and repeats it when it recomputes the call.
        names.append(DRAWN)
        tensors.append(torch.randint(1 << 62, (), device="cpu"))
    text = _write(name, (*names, *numbers), **constants)
    if name.endswith(POSITIONS):
        return torch.ops.ringattn.positions(tensors, [*numbers.values()], text)
    with_lse = arguments.get("return_lse", name.endswith(PAIRS))
    needs = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
    out, lse, _ = torch.ops.ringattn.attend(tensors, [*numbers.values()], text, needs)
    if name.endswith(PAIRS):
        return out, lse if with_lse else None
    return (out, lse) if with_lse else out


def _drops(arguments: dict[str, Any]) -> bool:
    """Whether the call drops attention weights, by its own option or its module's."""
    if arguments.get("dropout"):
        return True
    module = arguments.get("self")
    return module is not None and module.training and bool(module.options.dropout)


def _spell(pattern: Pattern) -> str:
    """The text of a pattern made within the trace, where it is not a real object."""
    values, nested = [], []
    for name in _field_names(type(pattern)):
        value = getattr(pattern, name)
        nested.append(isinstance(value, Pattern))
        values.append(_spell(value) if isinstance(value, Pattern) else value)
    return _print_pattern(type(pattern), tuple(values), tuple(nested))


@_constant
def _field_names(kind: type[Pattern]) -> tuple[str, ...]:
    """The names of a pattern's fields."""
    return tuple(kind.__dataclass_fields__)


@_constant
def _print_pattern(kind: type[Pattern], values: tuple[Any, ...], nested: tuple[bool, ...]) -> str:
    """repr of the pattern with these fields; `nested` flags the fields that are patterns, given as text."""
    pattern = object.__new__(kind)
    for name, value, is_pattern in zip(_field_names(kind), values, nested, strict=True):
        object.__setattr__(pattern, name, parse_pattern(value) if is_pattern else value)
    return repr(pattern)


@_constant
def _write(name: str, names: tuple[str, ...], /, **constants: Any) -> str:
    """The text of a call: its function, tensor names, number names, other arguments, and its index in the trace."""
    trace = torch._guards.TracingContext.try_get()
    index = 0
    if trace is not None:
        index = _calls[trace] = _calls.get(trace, 0) + 1
    return json.dumps([name, names, constants, index], default=_write_object)


def _write_object(value: Any) -> Any:
    """JSON for an argument that JSON does not support: an object becomes its number."""
    if isinstance(value, FakeScriptObject):  # the form of a process group in a trace
        value = value.real_obj
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if hasattr(value, "__dataclass_fields__") and not all(hasattr(value, x) for x in value.__dataclass_fields__):
        raise Unsupported(
            f"a {type(value).__name__} cannot be made within a compiled function; make it outside, and pass it to the "
            "function"
        )
    serial = next((known for known, other in _objects.items() if other is value), None)
    if serial is None:
        serial = next(_serials)
        _objects[serial] = value
    return {"object": serial}


# What runs.


@lru_cache(1024)
def _read(text: str) -> tuple[str, list[str], dict[str, Any], int]:
    """The arguments of `_write`, with objects still as dictionaries."""
    name, names, constants, index = json.loads(text)
    return name, names, constants, index


@lru_cache(64)
def _eager(name: str) -> Callable[..., Any]:
    """The function itself, not its operator."""
    return unwrap(resolve_name(name))


def _run(tensors: list[Tensor], numbers: list[int], text: str) -> Any:
    """The result of the function that `text` names."""
    name, names, constants, index = _read(text)
    arguments = {key: _find(value) if isinstance(value, dict) else value for key, value in constants.items()}
    for argument, x in zip(names, (*tensors, *numbers), strict=True):
        value = x.item() if isinstance(x, Tensor) and argument.startswith((NUMBER, "layout")) else x
        if isinstance(value, int):
            value = _recent.answer(value, partial(_find, {"number": value}))
        arguments[argument.removeprefix(NUMBER)] = value
    if f"{ROWS}0" in arguments:
        k = _read_rows(arguments)
        arguments = {name: x for name, x in arguments.items() if not name.startswith((ROWS, WEIGHTS))}
        arguments |= {"k": k, "v": None}
    token = call_index.set(index)
    try:
        with _drawing(arguments.pop(DRAWN, None)):
            return _eager(name)(**arguments)
    finally:
        call_index.reset(token)


def _read_rows(arguments: dict[str, Any]) -> Rows:
    """The Rows whose parts are arguments of an operator."""
    tensors, weights = ([x for name, x in arguments.items() if name.startswith(kind)] for kind in (ROWS, WEIGHTS))
    chunk, travel = arguments["v"]
    return Rows(*tensors, expand=arguments["k"], weights=weights, chunk=chunk, travel=travel)


@contextmanager
def _drawing(seed: Tensor | None) -> Iterator[None]:
    """A context that seeds torch's default generator with `seed`; None leaves the generator as it is."""
    if seed is None:
        yield
        return
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int(seed))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _find(spelled: dict[str, Any]) -> Any:
    """The object behind a text, or behind the number of a pattern or layout."""
    if "dtype" in spelled:
        return getattr(torch, spelled["dtype"])
    if "device" in spelled:
        return torch.device(spelled["device"])
    found = NUMBERED.get(spelled["number"]) if "number" in spelled else _objects.get(spelled["object"])
    if found is None:
        raise InvalidInput(
            "a pattern, layout, group or expand= of this compiled call was freed; make it outside of the compiled "
            "function, expand= not as a functools.partial, and keep it alive until the backward has run"
        )
    return found


def _attend(tensors: list[Tensor], numbers: list[int], text: str, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    record = _Record(8)
    record.leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    record.saved = []
    with _recording(record), torch.set_grad_enabled(any(needs)):
        result = _run(record.leaves, numbers, text)
    record.results = [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
    own = {_identify(x): index for index, x in enumerate((*record.leaves, *record.results))}
    record.saved = [own.get(_identify(x), x) for x in record.saved if isinstance(x, Tensor)]
    ticket = torch.frombuffer(record, dtype=torch.int64)
    if any(needs):
        _records[ticket.data_ptr()] = record
    out, *lse = (_lay_out(x.detach()) for x in record.results)
    return out, lse[0] if lse else out.new_empty(0), ticket


def _identify(x: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors with the same numbers in the same memory."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _attend_backward(
    grad: Tensor | None,
    grad_lse: Tensor | None,
    tensors: list[Tensor],
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    record = _records.get(ticket.data_ptr())
    if record is None:
        raise InvalidInput(
            "the int64 result of ringattn::attend names the tensors that the backward needs, but it was copied or "
            "moved to another device; leave it where it is"
        )
    pairs = [(x, g) for x, g in zip(record.results, (grad, grad_lse), strict=False) if g is not None]
    leaves = [x for x, need in zip(record.leaves, needs, strict=True) if need]
    record.current = [*tensors, out, lse]
    try:
        with _recording(record):
            found = torch.autograd.grad(
                [x for x, _ in pairs],
                leaves,
                [g for _, g in pairs],
                retain_graph=True,  # the graph is freed with the ticket
                allow_unused=True,
                materialize_grads=True,
            )
    finally:
        del record.current
    return [_match(g, x) for g, x in zip(found, leaves, strict=True)]


@contextmanager
def _recording(record: _Record) -> Iterator[None]:
    """A context in which torch records a graph, without saving inputs and results of the operator twice."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in RECORDING:
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()

    weak = ref(record)  # the graph, which the record owns, must not own the record

    def pack(x: Tensor) -> int:
        saved = cast(_Record, weak()).saved
        saved.append(x.detach())
        return len(saved) - 1

    def unpack(place: int) -> Tensor:
        record = cast(_Record, weak())
        x = record.saved[place]
        return record.current[x] if isinstance(x, int) else x

    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _lay_out(x: Tensor) -> Tensor:
    """x [B, H, n, ...] with the memory order of [B, n, H, ...], as most of the following layers need it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _match(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides that an empty tensor like x would have."""
    like = torch.empty_like(x)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


# What torch needs to know.


def _fake_attend(
    tensors: list[Tensor], numbers: list[int], text: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    name, names, constants, _ = _read(text)
    q = tensors[names.index("q")]
    if f"{ROWS}0" in names:
        given = {"k": _find(constants["k"]), "v": constants["v"]}
        _, v = _read_rows({**dict(zip(names, tensors, strict=False)), **given}).sample()
    else:
        v = tensors[names.index("v")]
    b, h, n = (*q.shape, 1, 1, 1)[:3]  # accepts a wrong shape: the call itself reports it to all ranks
    out = q.new_empty((b, n, h, *v.shape[3:])).transpose(1, 2)
    with_lse = constants.get("return_lse", name.endswith(PAIRS))
    lse = q.new_empty((b, n, h), dtype=wide(q.dtype)).transpose(1, 2) if with_lse else q.new_empty(0)
    return out, lse, torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_backward(
    grad: Tensor | None, grad_lse: Tensor | None, tensors: list[Tensor], out: Tensor, lse: Tensor, ticket: Tensor,
    needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x, need in zip(tensors, needs, strict=True) if need]


def _fake_positions(tensors: list[Tensor], numbers: list[int], text: str) -> Tensor:
    q = tensors[0]
    return q.new_empty(q.shape[2] if q.ndim > 2 else 1, dtype=torch.int64)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.numbers, _, ctx.needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None, _: None) -> tuple[Any, ...]:
    *tensors, out, lse, ticket = ctx.saved_tensors
    with torch.no_grad():
        gradients = torch.ops.ringattn.attend_backward(grad, grad_lse, tensors, out, lse, ticket, ctx.needs)
    found = iter(make_last(gradients, *tensors, grad, grad_lse))
    return [next(found) if need else None for need in ctx.needs], None if ctx.numbers else [], None, None


_library = torch.library.Library("ringattn", "DEF")
_OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "attend": (
        "(Tensor[] tensors, SymInt[] numbers, str call, bool[] needs) -> (Tensor, Tensor, Tensor)",
        _attend,
        _fake_attend,
    ),
    "attend_backward": (
        "(Tensor? grad, Tensor? grad_lse, Tensor[] tensors, Tensor out, Tensor lse, Tensor ticket, bool[] needs)"
        " -> Tensor[]",
        _attend_backward,
        _fake_backward,
    ),
    "positions": ("(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor", _run, _fake_positions),
}
for _name, (_schema, _run_operator, _fake) in _OPERATORS.items():
    # A CUDA graph would replay the kernel launches of a call without the exchanges between ranks.
    _library.define(_name + _schema, tags=(torch.Tag.cudagraph_unsafe,))
    _library.impl(_name, _run_operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringattn::{_name}", _fake, lib=_library)
torch.library.register_autograd("ringattn::attend", _differentiate, setup_context=_save, lib=_library)
#: The operators whose results `save_attention_policy` keeps.
KEPT = (torch.ops.ringattn.attend.default, torch.ops.ringattn.positions.default)


def save_attention_policy() -> Callable[..., CheckpointPolicy]:
    """A policy for torch.utils.checkpoint.create_selective_checkpoint_contexts: keep attention, recompute the rest.

    The ring then runs only in the forward, in eager and in compiled programs.
    """

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return keep


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for torch.utils.checkpoint: the recomputation reuses attention's (out, lse) from the forward.

    `checkpoint(layer, x, use_reentrant=False, context_fn=ringattn.keep_attention)` recomputes the layer in the
    backward, but without another pass around the ring: q, k and v are recomputed, and the output of every attention in
    the layer is kept. This takes memory for out, lse and the block that the ring's backward starts from. Without
    `keep_attention` the recomputation runs the ring again.
    """
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(save_attention_policy())
    return contexts
