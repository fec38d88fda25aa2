"""Elementwise operations: one record each. C++ names live in ``templates/scalar.h``.

Derivatives are program text in a numerically stable form with torch's values at kinks: relu'(0) = 0; abs'(0) = 0;
max and min split a tie in two halves (torch.maximum); clamp passes the gradient at its bounds; hardswish'(-3) = 0 and
hardswish'(3) = 1.
"""

from __future__ import annotations

from collections.abc import Callable

from coda.ops.table import Op, OpError, Type, broadcast, infer_arithmetic, infer_bool, infer_float, register


def _torch():
    import torch

    return torch


def pointwise(
    name: str,
    arity: int,
    torch: Callable,
    cpp: str,
    derivative: tuple[str | None, ...] | None,
    doc: str,
    infer: Callable = infer_float,
    symbol: str | None = None,
    surface: bool = True,
) -> Op:
    """Register an elementwise operation; the reference function gets operands aligned to the result's axes."""
    reference = lambda ctx, node, *xs: torch(*ctx.align(node, xs))  # noqa: E731
    return register(Op(name, arity, infer, reference, doc, cpp, derivative, symbol, surface))


# Arithmetic, spelt with symbols.
pointwise("add", 2, lambda a, b: a + b, "{0} + {1}", ("dy", "dy"), "a + b", infer_arithmetic, "+", False)
pointwise("sub", 2, lambda a, b: a - b, "{0} - {1}", ("dy", "-dy"), "a - b", infer_arithmetic, "-", False)
pointwise("mul", 2, lambda a, b: a * b, "{0} * {1}", ("dy * b", "dy * a"), "a * b", infer_arithmetic, "*", False)
pointwise(
    "div", 2, lambda a, b: a / b, "coda::div({0}, {1})", ("dy / b", "-dy * y / b"), "a / b", infer_float, "/", False
)
pointwise("neg", 1, lambda a: -a, "-{0}", ("-dy",), "-a", infer_arithmetic, "-", False)

# Comparisons give bool; a bool in arithmetic is 0 or 1.
for _name, _symbol, _fn in (
    ("eq", "==", lambda a, b: a == b),
    ("ne", "!=", lambda a, b: a != b),
    ("lt", "<", lambda a, b: a < b),
    ("le", "<=", lambda a, b: a <= b),
    ("gt", ">", lambda a, b: a > b),
    ("ge", ">=", lambda a, b: a >= b),
):
    pointwise(_name, 2, _fn, "{0} " + _symbol + " {1}", (None, None), f"a {_symbol} b", infer_bool, _symbol, False)


def _infer_where(types, attrs):
    if types[0].dtype.kind != "bool":
        raise OpError(
            f"the condition of 'where' is {types[0].dtype}, not bool", "compare it with something, as in x > 0"
        )
    return Type(infer_arithmetic(types[1:], attrs).dtype, broadcast(types))


pointwise(
    "where", 3, lambda c, a, b: _torch().where(c, a, b), "coda::where({0}, {1}, {2})",
    (None, "where(a, dy, 0)", "where(a, 0, dy)"), "b where the condition a holds, else c", _infer_where,
)  # fmt: skip
pointwise(
    "maximum", 2, lambda a, b: _torch().maximum(a, b), "coda::max({0}, {1})",
    ("where(a > b, dy, where(a == b, 0.5 * dy, 0))", "where(b > a, dy, where(a == b, 0.5 * dy, 0))"),
    "max(a, b); NaN if either is NaN (torch.maximum)", infer_arithmetic,
)  # fmt: skip
pointwise(
    "minimum", 2, lambda a, b: _torch().minimum(a, b), "coda::min({0}, {1})",
    ("where(a < b, dy, where(a == b, 0.5 * dy, 0))", "where(b < a, dy, where(a == b, 0.5 * dy, 0))"),
    "min(a, b); NaN if either is NaN (torch.minimum)", infer_arithmetic,
)  # fmt: skip
pointwise(
    "clamp", 3, lambda x, lo, hi: _torch().minimum(_torch().maximum(x, lo), hi), "coda::min(coda::max({0}, {1}), {2})",
    ("where(a >= b, where(a <= c, dy, 0), 0)", None, None), "a limited to [b, c] (torch.clamp)", infer_arithmetic,
)  # fmt: skip
pointwise("abs", 1, lambda a: a.abs(), "coda::abs({0})", ("dy * sign(a)",), "|a|", infer_arithmetic)
pointwise("sign", 1, lambda a: _torch().sign(a), "coda::sign({0})", ("0 * dy",), "-1, 0 or 1", infer_arithmetic)

# Transcendentals.
pointwise("exp", 1, lambda a: a.exp(), "coda::exp({0})", ("dy * y",), "e to the a")
pointwise("log", 1, lambda a: a.log(), "coda::log({0})", ("dy / a",), "natural logarithm")
pointwise("sqrt", 1, lambda a: a.sqrt(), "coda::sqrt({0})", ("0.5 * dy / y",), "square root")
pointwise("rsqrt", 1, lambda a: a.rsqrt(), "coda::rsqrt({0})", ("-0.5 * dy * y * y * y",), "1 / sqrt(a)")
pointwise("tanh", 1, lambda a: a.tanh(), "coda::tanh({0})", ("dy * (1 - y * y)",), "hyperbolic tangent")
pointwise("sigmoid", 1, lambda a: a.sigmoid(), "coda::sigmoid({0})", ("dy * y * (1 - y)",), "1 / (1 + exp(-a))")
pointwise(
    "erf", 1, lambda a: a.erf(), "coda::erf({0})", ("dy * 1.1283791670955126 * exp(-a * a)",),
    "error function; the constant of the derivative is 2/sqrt(pi)",
)  # fmt: skip

# Activations. Their derivatives share the exponential and the reciprocal of the function itself, in the operation table
# and in C++ (scalar.h): the gradient of a gated activation computes both.
pointwise("relu", 1, lambda a: a.relu(), "coda::relu({0})", ("where(a > 0, dy, 0)",), "max(a, 0) (torch.relu)")
pointwise(
    "silu", 1, lambda a: _torch().nn.functional.silu(a), "coda::silu({0})",
    ("dy * sigmoid(a) * (1 + a * (1 - sigmoid(a)))",), "a * sigmoid(a) (Elfwing et al. 2017; torch silu, 'swish')",
)  # fmt: skip
pointwise(
    "gelu_erf", 1, lambda a: _torch().nn.functional.gelu(a), "coda::gelu_erf({0})",
    ("dy * (0.5 * (1 + erf(0.7071067811865476 * a)) + 0.3989422804014327 * a * exp(-0.5 * a * a))",),
    "a * Phi(a), the exact GELU (Hendrycks & Gimpel 2016; torch gelu(approximate='none'))",
)  # fmt: skip
pointwise(
    "gelu_tanh", 1, lambda a: _torch().nn.functional.gelu(a, approximate="tanh"), "coda::gelu_tanh({0})",
    (  # with 0.5 (1 + tanh(u)) = sigmoid(2u), 2u = 2 sqrt(2/pi) (a + 0.044715 a^3)
        "dy * (sigmoid(a * (1.5957691216057308 + 0.07135481627260025 * (a * a)))"
        " + a * (sigmoid(a * (1.5957691216057308 + 0.07135481627260025 * (a * a)))"
        " * (1 - sigmoid(a * (1.5957691216057308 + 0.07135481627260025 * (a * a)))))"
        " * (1.5957691216057308 + 0.21406444881780076 * (a * a)))",
    ),
    "the tanh approximation of GELU (torch gelu(approximate='tanh'), Hugging Face gelu_pytorch_tanh)",
)  # fmt: skip
pointwise(
    "relu2", 1, lambda a: a.relu().square(), "coda::relu2({0})", ("dy * 2 * relu(a)",),
    "max(a, 0) squared (So et al. 2021, Primer; Hugging Face relu2)",
)  # fmt: skip
pointwise(
    "leaky_relu", 2, lambda a, b: _torch().where(a > 0, a, b * a), "coda::where({0} > 0.0f, {0}, {1} * {0})",
    ("where(a > 0, dy, b * dy)", "where(a > 0, 0, a * dy)"),
    "a where positive, else b * a (torch leaky_relu; prelu where b is a tensor)",
)  # fmt: skip
pointwise(
    "elu", 2, lambda a, b: _torch().where(a > 0, a, b * a.expm1()),
    "coda::where({0} > 0.0f, {0}, {1} * coda::expm1({0}))",
    ("where(a > 0, dy, dy * b * exp(a))", None), "a where positive, else b * (exp(a) - 1) (torch elu)",
)  # fmt: skip
pointwise(
    "quick_gelu", 1, lambda a: a * (1.702 * a).sigmoid(), "coda::quick_gelu({0})",
    ("dy * sigmoid(1.702 * a) * (1 + 1.702 * a * (1 - sigmoid(1.702 * a)))",),
    "a * sigmoid(1.702 * a), the sigmoid approximation of GELU (CLIP, gpt-oss; Hugging Face quick_gelu)",
)  # fmt: skip
pointwise(
    "softplus", 1, lambda a: _torch().nn.functional.softplus(a), "coda::softplus({0})", ("dy * sigmoid(a)",),
    "log(1 + exp(a)) (torch softplus)",
)  # fmt: skip
pointwise(
    "hardswish", 1, lambda a: _torch().nn.functional.hardswish(a), "coda::hardswish({0})",
    ("where(a <= -3, 0, where(a < 3, dy * (a / 3 + 0.5), dy))",),
    "a * clamp(a + 3, 0, 6) / 6 (Howard et al. 2019; torch hardswish)",
)  # fmt: skip
pointwise(
    "softcap", 2, lambda a, b: b * (a / b).tanh(), "{1} * coda::tanh(coda::div({0}, {1}))",
    (
        "dy * (1 - tanh(a / b) * tanh(a / b))",
        "dy * (tanh(a / b) - a / b * (1 - tanh(a / b) * tanh(a / b)))",
    ),
    "b * tanh(a / b): logits or scores kept below a cap (Gemma 2)",
)  # fmt: skip
