"""Elementwise operations, each as the program text of what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from coda.pytorch.aten.table import register
from coda.pytorch.refusal import Refusal
from coda.pytorch.values import Value

if TYPE_CHECKING:
    from coda.pytorch.translate import Translator

TEXTS = {
    "mul": "a * b",
    "div": "a / b",
    "neg": "-a",
    "abs": "abs(a)",
    "exp": "exp(a)",
    "log": "log(a)",
    "sqrt": "sqrt(a)",
    "rsqrt": "rsqrt(a)",
    "reciprocal": "1 / a",
    "square": "a * a",
    "tanh": "tanh(a)",
    "sigmoid": "sigmoid(a)",
    "erf": "erf(a)",
    "relu": "relu(a)",
    "silu": "silu(a)",
    "hardswish": "hardswish(a)",
    "maximum": "max(a, b)",
    "minimum": "min(a, b)",
}
POWERS = {2: "a * a", 3: "a * a * a", 0.5: "sqrt(a)", -0.5: "rsqrt(a)", -1: "1 / a"}


def apply(t: Translator, text: str, *args: Any) -> Value:
    """The value of a text over operands a, b ..."""
    dims, nodes = t.broadcast([t.value(a) for a in args])
    return Value(dims, t.text(text, **dict(zip("abc", nodes, strict=False))))


def _plain(node: fx.Node) -> bool:
    return not node.kwargs and all(isinstance(a, (fx.Node, int, float)) for a in node.args)


def _register(name: str, text: str) -> None:
    @register("pointwise", name, takes=_plain)
    def translate(t: Translator, node: fx.Node, *args: Any) -> Value:
        return apply(t, text, *args)


for _name, _text in TEXTS.items():
    _register(_name, _text)


@register("pointwise", "add", "sub")
def add(t: Translator, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Value:
    sign = "+" if "add" in str(node.target) else "-"
    return apply(t, f"a {sign} b" if alpha == 1 else f"a {sign} b * c", a, b, *([] if alpha == 1 else [alpha]))


@register("pointwise", "rsub")
def rsub(t: Translator, node: fx.Node, a: Any, b: Any, alpha: float = 1) -> Value:
    return apply(t, "b - a" if alpha == 1 else "b - a * c", a, b, *([] if alpha == 1 else [alpha]))


@register("pointwise", "pow", takes=lambda node: node.args[1] in POWERS)
def power(t: Translator, node: fx.Node, a: Any, exponent: float) -> Value:
    return apply(t, POWERS[exponent], a)


@register("pointwise", "gelu")
def gelu(t: Translator, node: fx.Node, a: Any, approximate: str = "none") -> Value:
    return apply(t, "gelu_tanh(a)" if approximate == "tanh" else "gelu_erf(a)", a)


@register("pointwise", "clamp", takes=lambda node: all(not isinstance(a, fx.Node) for a in node.args[1:]))
def clamp(t: Translator, node: fx.Node, a: Any, lo: float | None = None, hi: float | None = None) -> Value:
    if lo is None or hi is None:
        raise Refusal("a clamp with one bound is not translated")
    return apply(t, "clamp(a, b, c)", a, lo, hi)
