"""Fused functions on torch tensors, with derivatives: thin wrappers over programs.

>>> from coda.nn import functional as F
>>> y = F.linear_swiglu(x, w_gate, w_up)        # silu(x @ w_gate.T) * (x @ w_up.T)

Operands are bf16, f16 or f32 with any leading dims; norm weights may have a dtype of their own. Every operand may want
a gradient; the backward is derived from the program. Results round once, where they are stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda.dtypes import from_torch
from coda.errors import CodaError
from coda.pytorch.block import Options
from coda.pytorch.op import BLOCK

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
LINEAR_CROSS_ENTROPY = """
program linear_cross_entropy(x: {x}[M, K], w: {x}[V, K], target: i64[M]) {{
    z = x @ w.T
    known = (target >= 0) * (target < size(V))
    loss = where(known > 0, logsumexp(z, V) - pick(z, V, target), nan)
    return nll = where(target == {ignore!r}, 0, loss): f32
}}
"""


def rms_norm_linear(
    x: Tensor, gamma: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0
) -> Tensor:
    """``rms_norm(x) * (offset + gamma) @ weight.T + bias``; ``offset=1`` is Gemma's norm."""
    _same_dtype(x, weight=weight, bias=bias)
    template = RMS_NORM_LINEAR if bias is None else RMS_NORM_LINEAR_BIAS
    text = _text(template, x=x.dtype, gamma=gamma.dtype, eps=eps, offset=offset)
    operands = {"x": _rows(x, weight), "gamma": gamma, "w": weight} | ({} if bias is None else {"bias": bias})
    sizes = {"M": operands["x"].shape[0], "K": weight.shape[1], "N": weight.shape[0]}
    return _run(text, operands, sizes).view(*x.shape[:-1], weight.shape[0])


def linear_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    """``silu(x @ w_gate.T) * (x @ w_up.T)``: one product, the weights stay where they are."""
    _same_dtype(x, w_gate=w_gate, w_up=w_up)
    rows = _rows(x, w_gate)
    sizes = {"M": rows.shape[0], "K": w_gate.shape[1], "N": w_gate.shape[0]}
    y = _run(_text(LINEAR_SWIGLU, x=x.dtype), {"x": rows, "w_gate": w_gate, "w_up": w_up}, sizes)
    return y.view(*x.shape[:-1], w_gate.shape[0])


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """``cross_entropy(x @ weight.T, target)`` without storing the logits; ``reduction`` is "none", "sum" or "mean".

    A target that is no class and not ``ignore_index`` gives NaN. The backward computes the logits again; their gradient
    is stored in the dtype of ``x`` (it is not cut into chunks yet).
    """
    _same_dtype(x, weight=weight)
    if reduction not in ("none", "sum", "mean"):
        raise CodaError.of(f"reduction is {reduction!r}", "'none', 'sum' or 'mean'")
    rows, labels = _rows(x, weight), target.reshape(-1).long()
    sizes = {"M": rows.shape[0], "K": weight.shape[1], "V": weight.shape[0]}
    text = _text(LINEAR_CROSS_ENTROPY, x=x.dtype, ignore=ignore_index)
    nll = _run(text, {"x": rows, "w": weight, "target": labels}, sizes, memory="low")
    if reduction == "none":
        return nll.view(target.shape)
    return nll.sum() if reduction == "sum" else nll.sum() / (labels != ignore_index).sum()


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """The operand as a matrix, after a check that it fits the weight."""
    if type(weight).__name__ == "DTensor" or weight.dim() != 2:
        raise CodaError.of(
            f"the weight is a {type(weight).__name__} with {weight.dim()} dims, not a matrix",
            "under FSDP call this inside the forward of the module that owns the weight, so that it is gathered",
        )
    if x.shape[-1] != weight.shape[1]:
        raise CodaError.of(
            f"the operand has {x.shape[-1]} columns, the weight {list(weight.shape)} takes {weight.shape[1]}"
        )
    return x.reshape(-1, x.shape[-1])


def _same_dtype(x: Tensor, **others: Tensor | None) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CodaError.of(f"the operand is {x.dtype}", "it can be bfloat16, float16 or float32")
    for name, other in others.items():
        if other is not None and other.dtype != x.dtype:
            raise CodaError.of(f"'{name}' is {other.dtype}, the operand {x.dtype}", f"pass {name}.to({x.dtype})")


def _run(text: str, operands: dict[str, Tensor], sizes: dict[str, int], memory: str = "fast") -> Tensor:
    wrt = tuple(n for n, x in operands.items() if x.requires_grad and torch.is_grad_enabled())
    return BLOCK(list(operands.values()), list(sizes.values()), text, _options(tuple(sizes), wrt, memory))[0]


# torch.compile takes these two for constants: it cannot look inside.


@torch.compiler.assume_constant_result
def _text(template: str, **values: Any) -> str:
    """A program with its dtypes and numbers."""
    names = {n: from_torch(v) if isinstance(v, torch.dtype) else v for n, v in values.items()}
    return template.format(**names)


@torch.compiler.assume_constant_result
def _options(sizes: tuple[str, ...], wrt: tuple[str, ...], memory: str) -> str:
    return Options(sizes=sizes, wrt=wrt, memory=memory).text()
