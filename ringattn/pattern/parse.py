"""Read a pattern back from its repr, without evaluating anything."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from ..errors import InvalidInput, did_you_mean
from .base import Pattern

#: Characters of a written pattern that an error repeats.
SHOWN = 300


def parse(text: str, names: Mapping[str, Callable[..., Pattern]]) -> Pattern:
    """The pattern that `text` writes, such as "Causal() & Window(4096)". `names` are the callables allowed."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", None) or "it is nested too deep"
        raise InvalidInput(f"pattern {shown!r} does not parse: {why}; try 'Causal() & Window(4096)'") from None

    def build(node: ast.expr) -> Pattern:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return build(node.left) & build(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return build(node.left) | build(node.right)
        if isinstance(node, ast.Name):
            node = ast.Call(node, [], [])
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise InvalidInput(
                f"pattern {shown!r}: {ast.unparse(node)!r} is not a pattern; "
                "patterns are calls joined by & and |, such as 'Causal() & Window(4096)'"
            )
        name = node.func.id
        if name not in names:
            hint = did_you_mean(name, names)
            raise InvalidInput(
                f"pattern {shown!r}: unknown name {name!r}; {hint}known names: {', '.join(sorted(names))}"
            )
        words = [word.arg for word in node.keywords]
        if None in words:
            raise InvalidInput(
                f"pattern {shown!r}: ** is not understood in {ast.unparse(node)}; write the arguments out, such as Window(4096, right=0)"
            )
        twice = {str(word) for word in words if words.count(word) > 1}
        if twice:
            raise InvalidInput(
                f"pattern {shown!r}: {ast.unparse(node)} gives {', '.join(sorted(twice))} twice; give it once"
            )
        values = [argument(value) for value in node.args]
        try:
            return names[name](*values, **{str(word.arg): argument(word.value) for word in node.keywords})
        except TypeError as error:
            raise InvalidInput(f"pattern {shown!r}: {ast.unparse(node)}: {error}") from None

    def argument(node: ast.expr) -> object:
        if isinstance(node, ast.Call | ast.BinOp):
            return build(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise InvalidInput(
                f"pattern {shown!r}: the argument {ast.unparse(node)!r} is not a plain value; "
                "write numbers, strings, tuples or lists"
            ) from None

    try:
        return build(tree)
    except RecursionError:
        raise InvalidInput(
            f"pattern {shown!r}: is nested too deep; write it with fewer brackets and operators"
        ) from None
    except OverflowError as error:
        raise InvalidInput(
            f"pattern {shown!r}: a number in it is too large ({error}); write numbers below 2^63"
        ) from None
