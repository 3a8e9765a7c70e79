"""Attention as operators of torch's graphs: for torch.compile, and for checkpoints that select what they save.

`ringattn::attend` runs one of our functions as it runs without a graph, with its handshake and its errors. It keeps the
part of the autograd graph that the function makes; `ringattn::attend_backward` runs this part backward. The operators
take tensors, numbers of patterns and layouts, and a text with all other arguments. A new pattern is a new number, for
which torch compiles nothing. In the text a number stands for each object, whose identity torch.compile guards, so that
the object lives wherever a graph that names it begins.

What a forward keeps belongs to the memory of the operator's third result, the ticket. The graph saves the ticket for
the backward, so that what the forward keeps ends with the graph of the call.

No effect token of torch orders the operators: in torch 2.13 operators with tokens fail in plain checkpointing. All
ranks run the calls of a graph in the order in which the program makes them; torch's passes keep this order, and where
one would not, the handshake finds it (`handshake.call_index`) and all ranks raise Mismatch before the first message.
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
from ..pattern import Pattern, parse_pattern
from .arguments import cast_inputs
from .handshake import call_index
from .last import make_last

P = ParamSpec("P")
R = TypeVar("R")
#: Dispatch keys without which torch records no graph; torch excludes them while an operator runs.
_K = torch._C.DispatchKey
RECORDING = (_K.AutogradFunctionality, _K.AutogradOther, _K.AutogradNestedTensor, _K.ADInplaceOrView)
#: Functions that return positions, and functions that always return (out, lse or None).
POSITIONS, PAIRS = ".positions", (".attend", ".attend_by")
#: The name of the tensor with the number that a call draws its dropout from.
DRAWN = "drawn"
#: Types of numbers; to torch.compile a number of NumPy is an array.
SCALARS = int, float, np.generic, np.ndarray
#: Arguments that a compiled function may change from call to call, and what the names of their tensors begin with.
NUMBERS, NUMBER = ("scale", "scaling", "softcap", "dropout"), "number "
#: Objects by the numbers that stand for them in texts.
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()
_serials = count()
#: The patterns and layouts that ran last: a checkpoint may run them again when the program has let go of them.
_recent = Cache(1 << 24)
#: How many calls each trace of torch.compile has met.
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class _Record(bytearray):
    """The memory of a ticket, with what the forward keeps for its backward."""

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
    """The function, which torch.compile runs while it traces, and whose arguments it guards: objects by identity."""
    return cast(Callable[P, R], torch.compiler.assume_constant_result(function))


def call_in_graph(name: str, arguments: dict[str, Any]) -> Any:
    """The result of the `compilable` function `name`, "module:function", by one operator."""
    q, k, v = cast_inputs(arguments["q"], arguments["k"], arguments["v"])
    arguments = {**arguments, "q": q, "k": k, "v": v}
    names, tensors, numbers, constants = [], [], {}, {}
    for argument, value in arguments.items():
        if isinstance(value, Tensor):  # "layout": the number of one, see `context_parallel`
            names.append(argument)
            tensors.append(value)
        elif isinstance(value, Numbered) and value.number:
            numbers[argument] = value.number
        elif argument in NUMBERS and isinstance(value, SCALARS) and not isinstance(value, bool):
            # A number that changes between calls is no constant, which `_write` needs.
            names.append(NUMBER + argument)
            make, value = (torch.tensor, float(value)) if isinstance(value, int | float) else (torch.as_tensor, value)
            tensors.append(make(value, dtype=torch.float64, device="cpu"))
        else:
            constants[argument] = _spell(value) if isinstance(value, Pattern) else value
    if _drops(arguments):
        # torch.compile sees this draw, and repeats the draw where it computes the call again.
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
    """Whether the call drops attention weights: by its option, or by that of its module."""
    if arguments.get("dropout"):
        return True
    module = arguments.get("self")
    return module is not None and module.training and bool(module.options.dropout)


def _spell(pattern: Pattern) -> str:
    """The text of a pattern that was made in the trace, where a pattern is no object."""
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
    """repr of the pattern with these fields, of which the nested patterns are texts."""
    pattern = object.__new__(kind)
    for name, value, is_pattern in zip(_field_names(kind), values, nested, strict=True):
        object.__setattr__(pattern, name, parse_pattern(value) if is_pattern else value)
    return repr(pattern)


@_constant
def _write(name: str, names: tuple[str, ...], /, **constants: Any) -> str:
    """The text of a call: its function, names of tensors and numbers, other arguments, and its index in the trace."""
    trace = torch._guards.TracingContext.try_get()
    index = 0
    if trace is not None:
        index = _calls[trace] = _calls.get(trace, 0) + 1
    return json.dumps([name, names, constants, index], default=_write_object)


def _write_object(value: Any) -> Any:
    """An argument that JSON does not know; objects by their numbers."""
    if isinstance(value, FakeScriptObject):  # how a process group looks in a trace
        value = value.real_obj
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if hasattr(value, "__dataclass_fields__") and not all(hasattr(value, x) for x in value.__dataclass_fields__):
        raise Unsupported(
            f"a {type(value).__name__} made within a compiled function; make it before, and pass it to the function"
        )
    serial = next((known for known, other in _objects.items() if other is value), None)
    if serial is None:
        serial = next(_serials)
        _objects[serial] = value
    return {"object": serial}


# What runs.


@lru_cache(1024)
def _read(text: str) -> tuple[str, list[str], dict[str, Any], int]:
    """What `_write` has written, objects as dictionaries."""
    name, names, constants, index = json.loads(text)
    return name, names, constants, index


@lru_cache(64)
def _eager(name: str) -> Callable[..., Any]:
    """The function itself, which runs without a graph."""
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
    token = call_index.set(index)
    try:
        with _drawing(arguments.pop(DRAWN, None)):
            return _eager(name)(**arguments)
    finally:
        call_index.reset(token)


@contextmanager
def _drawing(seed: Tensor | None) -> Iterator[None]:
    """A context in which torch's default generator begins with `seed`; None: in which it goes on."""
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
    """The object that a text, or the number of a pattern or layout, stands for."""
    if "dtype" in spelled:
        return getattr(torch, spelled["dtype"])
    if "device" in spelled:
        return torch.device(spelled["device"])
    found = NUMBERED.get(spelled["number"]) if "number" in spelled else _objects.get(spelled["object"])
    if found is None:
        raise InvalidInput(
            "a pattern, layout or group of this compiled call is gone; keep the objects that a compiled function was "
            "given until its backward has run"
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
    """What two tensors of the same numbers in the same memory have in common."""
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
            "the ticket of a forward was copied, or moved to another device, so that its backward finds nothing; leave "
            "the int64 result of ringattn::attend where it is"
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
                retain_graph=True,  # it ends with the ticket
                allow_unused=True,
                materialize_grads=True,
            )
    finally:
        del record.current
    return [_match(g, x) for g, x in zip(found, leaves, strict=True)]


@contextmanager
def _recording(record: _Record) -> Iterator[None]:
    """A context in which torch records a graph; inputs and results of the operator are not saved twice."""
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
    """x [B, H, n, ...] in the memory of [B, n, H, ...], as most layers take it next."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _match(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient with the strides that an empty tensor like x would have."""
    like = torch.empty_like(x)
    return gradient if gradient.stride() == like.stride() else like.copy_(gradient)


def _positions(tensors: list[Tensor], numbers: list[int], text: str) -> Tensor:
    found: Tensor = _run(tensors, numbers, text)
    return found


# What torch is told.


def _fake_attend(
    tensors: list[Tensor], numbers: list[int], text: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    name, names, constants, _ = _read(text)
    q, v = (tensors[names.index(x)] for x in "qv")
    b, h, n = (*q.shape, 1, 1, 1)[:3]  # of a wrong shape, too: the call itself reports to all ranks
    out = q.new_empty((b, n, h, *v.shape[3:])).transpose(1, 2)
    with_lse = constants.get("return_lse", name.endswith(PAIRS))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((b, n, h), dtype=wide).transpose(1, 2) if with_lse else q.new_empty(0)
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
    "positions": ("(Tensor[] tensors, SymInt[] numbers, str call) -> Tensor", _positions, _fake_positions),
}
for _name, (_schema, _run_operator, _fake) in _OPERATORS.items():
    # A CUDA graph would replay the launches of a call without the exchanges between the ranks.
    _library.define(_name + _schema, tags=(torch.Tag.cudagraph_unsafe,))
    _library.impl(_name, _run_operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ringattn::{_name}", _fake, lib=_library)
torch.library.register_autograd("ringattn::attend", _differentiate, setup_context=_save, lib=_library)
#: The operators whose results a checkpoint keeps.
KEPT = (torch.ops.ringattn.attend.default, torch.ops.ringattn.positions.default)


def save_attention_policy() -> Callable[..., CheckpointPolicy]:
    """A policy for torch.utils.checkpoint.create_selective_checkpoint_contexts: keep attention, recompute the rest.

    The ring then runs once in the forward, in eager and in compiled programs.
    """

    def keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return keep


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for torch.utils.checkpoint: the recomputation takes (out, lse) of attention from the forward.

    `checkpoint(layer, x, use_reentrant=False, context_fn=ringattn.keep_attention)` recomputes the layer in the
    backward without another pass around the ring: q, k and v are recomputed, and the output of every attention in the
    layer is kept. This costs the memory of out, lse and the block that the ring's backward starts from. Without
    `keep_attention` nothing is kept, and the ring runs once more.
    """
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(save_attention_policy())
    return contexts
