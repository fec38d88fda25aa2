"""Fused functions on torch tensors, with derivatives: thin wrappers over programs.

>>> from coda.nn import functional as F
>>> y = F.linear_swiglu(x, w_gate, w_up)        # silu(x @ w_gate.T) * (x @ w_up.T)

Operands are bf16, f16 or f32 with any leading dims; norm weights may have a dtype of their own. Every operand may want
a gradient; the backward is derived from the program. Results round once, where they are stored.
"""

from __future__ import annotations

from torch import Tensor

from coda.nn.loss import linear_cross_entropy
from coda.nn.operands import as_rows, check_same_dtype, run, text_of

__all__ = ["linear_cross_entropy", "linear_swiglu", "rms_norm_linear"]

RMS_NORM_LINEAR = """
program rms_norm_linear(x: {x}[M, K], gamma: {gamma}[K], w: {x}[N, K]) {{
    return y = rms_norm(x, gamma, {eps!r}, offset={offset!r}) @ w.T: {x}
}}
"""
RMS_NORM_LINEAR_BIAS = """
program rms_norm_linear(x: {x}[M, K], gamma: {gamma}[K], w: {x}[N, K], bias: {x}[N]) {{
    return y = rms_norm(x, gamma, {eps!r}, offset={offset!r}) @ w.T + bias: {x}
}}
"""
LINEAR_SWIGLU = """
program linear_swiglu(x: {x}[M, K], w_gate: {x}[N, K], w_up: {x}[N, K]) {{
    return y = silu(x @ w_gate.T) * (x @ w_up.T): {x}
}}
"""


def rms_norm_linear(
    x: Tensor, gamma: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """``rms_norm(x) * (offset + gamma) @ weight.T + bias``; ``offset=1`` is Gemma's norm."""
    check_same_dtype(x, weight=weight, bias=bias)
    template = RMS_NORM_LINEAR if bias is None else RMS_NORM_LINEAR_BIAS
    text = text_of(template, x=x.dtype, gamma=gamma.dtype, eps=eps, offset=offset)
    operands = {"x": as_rows(x, weight), "gamma": gamma, "w": weight} | ({} if bias is None else {"bias": bias})
    sizes = {"M": operands["x"].shape[0], "K": weight.shape[1], "N": weight.shape[0]}
    return run(text, operands, sizes).view(*x.shape[:-1], weight.shape[0])


def linear_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """``silu(x @ w_gate.T) * (x @ w_up.T)``: one product, the weights stay where they are."""
    check_same_dtype(x, w_gate=w_gate, w_up=w_up)
    rows = as_rows(x, w_gate)
    sizes = {"M": rows.shape[0], "K": w_gate.shape[1], "N": w_gate.shape[0]}
    y = run(text_of(LINEAR_SWIGLU, x=x.dtype), {"x": rows, "w_gate": w_gate, "w_up": w_up}, sizes)
    return y.view(*x.shape[:-1], w_gate.shape[0])
