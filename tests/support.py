"""What tests of different folders share."""

from __future__ import annotations

import coda
from coda.dtypes import DType
from coda.ir import Axis, Node, Program, Type
from coda.ops import build

# The programs that the README and many tests use.
BIAS_GELU = """
program bias_gelu(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?) {
    return gelu_tanh(x @ w.T + bias): bf16
}
"""
RESIDUAL_STATS = """
program residual_stats(o: bf16[M, K], w: bf16[N, K], x: bf16[M, N]) {
    h = cast(x + o @ w.T, bf16)
    return h, s = sum(h * h, N): f32
}
"""
ROW_SCALE = """
program row_scale(x: bf16[M, K], w: bf16[N, K], r: f32[M]) {
    return r * (x @ w.T): bf16
}
"""


def program(text: str, **consts: int | float | str) -> Program:
    """The only program of a text."""
    (only,) = coda.parse(text, **consts).programs.values()
    return only


def tensor_type(dtype: DType, *axes: str) -> Type:
    """A type over free axes, each a dim."""
    return Type(dtype, tuple((Axis.free(a),) for a in axes))


def operand(name: str, dtype: DType, *axes: str) -> Node:
    return build("input", name=name, type=tensor_type(dtype, *axes))
