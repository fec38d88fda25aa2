"""What tests of different folders share."""

from __future__ import annotations

import torch
from torch import Tensor

import coda
from coda.dtypes import DType
from coda.errors import CodaError
from coda.ir import Axis, Node, Program, Type
from coda.ops import build
from coda.runtime.binding import type_shape
from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate
from coda.target import TILES, lower
from coda.target.legality import can_lower

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


class PredicateArtifact:
    """Stands for built kernels: it accepts exactly what ``can_lower`` accepts, and computes with the interpreter.

    The launcher of a real artifact asks the same predicate, so routes and copies are those of a GPU.
    """

    def __init__(self, program: Program):
        self.program, self.plan, self.runs = program, lower(program), 0

    def check(self, args):
        verdict = can_lower(self.plan, args, TILES[0])
        return None if verdict else str(verdict)

    def output_shapes(self, sizes):
        return {o.name: type_shape(o.type, sizes) for o in self.program.outputs}

    def workspace_bytes(self, args):
        return 0

    def run(self, args, workspace, stream):
        if refusal := self.check(args):
            raise CodaError.of(refusal)
        self.runs += 1
        count = len(self.program.params)
        inputs = {p.name: x for p, x in zip(self.program.params, args[:count], strict=True)}
        results = evaluate(self.program, inputs).values()
        for result, out in zip(results, args[count:], strict=True):
            out.copy_(result)

    def warmup(self, device):
        pass


def kernel(text: str, fallback: str = "copy") -> CompiledProgram:
    """A program that takes the kernel's routes on CPU tensors."""
    p = program(text)
    return CompiledProgram(p, fallback=fallback, artifact=PredicateArtifact(p), device_type="cpu")


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, up to the sign of zero and the payload of NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal element by element, NaN where the other is NaN."""
    a, b = a.double(), b.double()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


LAYOUTS = ("contiguous", "transposed", "column slice", "offset by one element", "expanded")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values at other addresses; expanded rows are all the first."""
    if x.dim() == 0 or not x.numel():
        return x
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() == 2 else x.repeat_interleave(2)[::2]
    if layout == "column slice":
        wide = torch.cat([x, x, x], -1)
        return wide[..., x.shape[-1] : 2 * x.shape[-1]]
    if layout == "offset by one element":
        buffer = torch.cat([x.flatten()[:1], x.flatten()])
        return buffer[1:].view(x.shape)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x.clone()
