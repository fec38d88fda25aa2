"""Fused functions on torch tensors, with derivatives: thin wrappers over programs.

>>> from coda.nn import functional as F
>>> y = F.linear_swiglu(x, w_gate, w_up)        # silu(x @ w_gate.T) * (x @ w_up.T)

Operands are bf16, f16 or f32 with any leading dims, all of one dtype; norm weights may have a dtype of their own. Under
autocast operands are converted as those of torch's linear are. Every operand may want a gradient; the backward is
derived from the program. Results round once, where they are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coda.errors import CodaError, did_you_mean
from coda.nn.loss import linear_cross_entropy
from coda.nn.operands import as_rows, check_same_dtype, run, text_of

__all__ = [
    "layer_norm_linear", "linear_act", "linear_add", "linear_cross_entropy", "linear_geglu", "linear_swiglu",
    "rms_norm_linear", "rms_norm_swiglu",
]  # fmt: skip

DIMS = {
    "x": "M, K", "w": "N, K", "w_gate": "N, K", "w_up": "N, K", "bias": "N", "residual": "M, N", "gamma": "K",
    "beta": "K",
}  # fmt: skip
OF_NORMS = ("gamma", "beta")
ACTIVATIONS = ("relu", "relu2", "silu", "gelu_erf", "gelu_tanh", "quick_gelu", "sigmoid", "tanh", "softplus")


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str) -> Tensor:
    """``activation(x @ weight.T + bias)``, an activation of the language by name: ``gelu_tanh`` and ``gelu_erf`` are
    the two forms of GELU."""
    if activation not in ACTIVATIONS:
        hint = did_you_mean(activation, set(ACTIVATIONS)) or f"there are {', '.join(ACTIVATIONS)}"
        raise CodaError.of(f"no activation is called '{activation}'", hint)
    return _fused("linear_act", f"{activation}({_linear('x', bias)})", x=x, w=weight, bias=bias)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """``residual + (x @ weight.T + bias)``, added before it is rounded."""
    if residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise CodaError.of(f"the residual is {list(residual.shape)}, the product {[*x.shape[:-1], weight.shape[0]]}")
    return _fused("linear_add", f"residual + {_linear('x', bias)}", x=x, w=weight, bias=bias, residual=residual)


def linear_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """``silu(x @ w_gate.T) * (x @ w_up.T)``: one product, the weights stay where they are."""
    return _fused("linear_swiglu", "silu(x @ w_gate.T) * (x @ w_up.T)", x=x, w_gate=w_gate, w_up=w_up)


def linear_geglu(x: Tensor, w_gate: Tensor, w_up: Tensor, *, approximate: str = "none") -> Tensor:
    """``gelu(x @ w_gate.T) * (x @ w_up.T)``; ``approximate`` is "none" or "tanh", as for torch's gelu."""
    if approximate not in ("none", "tanh"):
        raise CodaError.of(f"approximate is {approximate!r}", "'none' or 'tanh'")
    gelu = "gelu_tanh" if approximate == "tanh" else "gelu_erf"
    return _fused("linear_geglu", f"{gelu}(x @ w_gate.T) * (x @ w_up.T)", x=x, w_gate=w_gate, w_up=w_up)


def rms_norm_linear(
    x: Tensor, gamma: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """``rms_norm(x) * (offset + gamma) @ weight.T + bias``; ``offset=1`` is Gemma's norm."""
    norm = f"rms_norm(x, gamma, {eps!r}, offset={offset!r})"
    return _fused("rms_norm_linear", _linear(norm, bias), x=x, gamma=gamma, w=weight, bias=bias)


def layer_norm_linear(
    x: Tensor, gamma: Tensor, beta: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """``layer_norm(x, gamma, beta) @ weight.T + bias``."""
    norm = f"layer_norm(x, gamma, {'' if beta is None else 'beta, '}eps={eps!r})"
    return _fused("layer_norm_linear", _linear(norm, bias), x=x, gamma=gamma, beta=beta, w=weight, bias=bias)


def rms_norm_swiglu(
    x: Tensor, gamma: Tensor, w_gate: Tensor, w_up: Tensor, *, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """``silu(n @ w_gate.T) * (n @ w_up.T)`` with ``n = rms_norm(x) * (offset + gamma)``: the norm costs no pass over x
    of its own beyond its statistic."""
    norm = f"rms_norm(x, gamma, {eps!r}, offset={offset!r})"
    text = f"silu({norm} @ w_gate.T) * ({norm} @ w_up.T)"
    return _fused("rms_norm_swiglu", text, x=x, gamma=gamma, w_gate=w_gate, w_up=w_up)


def _linear(x: str, bias: Tensor | None) -> str:
    return f"({x} @ w.T{'' if bias is None else ' + bias'})"


def _fused(name: str, expression: str, **operands: Tensor | None) -> Tensor:
    """A program of one expression over operands named as in DIMS; those that are None are not in it."""
    given = _converted({n: t for n, t in operands.items() if t is not None})
    x, weight = given["x"], next(t for n, t in given.items() if n.startswith("w"))
    check_same_dtype(x, **{n: t for n, t in given.items() if n not in (*OF_NORMS, "x")})
    for other in (t for n, t in given.items() if n.startswith("w")):
        rows = as_rows(x, other)
    leading, columns = x.shape[:-1], weight.shape[0]
    given["x"] = rows
    if "residual" in given:
        given["residual"] = given["residual"].reshape(-1, columns)
    params = ", ".join(f"{n}: {{{n}}}[{DIMS[n]}]" for n in given)
    template = f"program {name}({params}) {{{{ return y = {expression}: {{x}} }}}}"
    text = text_of(template, **{n: t.dtype for n, t in given.items()})
    sizes = {"M": rows.shape[0], "K": weight.shape[1], "N": columns}
    return run(text, given, sizes).view(*leading, columns)


def _converted(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The operands as autocast wants them."""
    device = operands["x"].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return {n: t if n in OF_NORMS else t.to(dtype) for n, t in operands.items()}
