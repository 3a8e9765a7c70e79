"""Read a pattern back from its repr. The text is parsed with `ast` and never evaluated."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping

from ..dtypes import check_type
from ..errors import InvalidInput
from ..text import did_you_mean, shorten
from .base import Pattern

#: How many characters of the text an error message quotes.
SHOWN = 300


class PatternParser:
    """Parses text that calls `functions` by name and joins the resulting patterns with & and |.

    Arguments are literals or patterns.
    """

    def __init__(self, text: str, functions: Mapping[str, Callable[..., Pattern]]) -> None:
        check_type("pattern", text, "str")
        self.text, self.functions = text, functions

    def parse(self) -> list[Pattern]:
        """The patterns in the text: one, or those of a list. Raises InvalidInput for any other text."""
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError) as error:
            reason = getattr(error, "msg", None) or "the text is nested too deep"
            raise self._error(f"it does not parse: {reason}; try 'Causal() & Window(4096)'") from None
        try:
            return [self._build(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
        except RecursionError:
            raise self._error("the text is nested too deep; write it with fewer brackets and operators") from None

    def _error(self, message: str) -> InvalidInput:
        return InvalidInput(f"pattern {shorten(self.text, SHOWN)!r}: {message}")

    def _build(self, node: ast.expr) -> Pattern:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            return self._build(node.left) & self._build(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._build(node.left) | self._build(node.right)
        if isinstance(node, ast.Name):
            node = ast.Call(node, [], [])
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise self._error(f"{ast.unparse(node)!r} is not a pattern; try 'Causal() & Window(4096)'")
        return self._call(node, node.func.id)

    def _call(self, node: ast.Call, name: str) -> Pattern:
        if name not in self.functions:
            hint = did_you_mean(name, self.functions)
            raise self._error(f"unknown name {name!r}; {hint}known names: {', '.join(sorted(self.functions))}")
        keywords: dict[str, object] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self._error(f"** is not understood in {ast.unparse(node)}; write the arguments out")
            if keyword.arg in keywords:
                raise self._error(f"{ast.unparse(node)} gives {keyword.arg} twice; give it once")
            keywords[keyword.arg] = self._argument(keyword.value)
        arguments = [self._argument(argument) for argument in node.args]
        try:
            return self.functions[name](*arguments, **keywords)
        except TypeError as error:
            signature = inspect.signature(self.functions[name])
            parameters = ", ".join(str(parameter).partition(":")[0] for parameter in signature.parameters.values())
            raise self._error(f"{ast.unparse(node)}: {error}; expected {name}({parameters})") from None

    def _argument(self, node: ast.expr) -> object:
        if isinstance(node, ast.Call | ast.BinOp):
            return self._build(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self._error(f"the argument {ast.unparse(node)!r} is not a plain value, such as a number") from None
