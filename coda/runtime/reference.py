"""The reference interpreter: what a program means, in plain torch, on any device.

Every operation's record in ``coda.ops`` has a torch reference; this file walks the DAG and gives those references
their context: sizes, alignment by axis name, and rounding. Three modes answer three questions:

* ``evaluate(p, x)``: the program as written: f32 arithmetic, every cast rounds. What a kernel is expected to give,
  up to the order of additions.
* ``evaluate(p, x, arithmetic=torch.float64)``: the same roundings, arithmetic without error.
* ``evaluate(p, x, exact=True)``: float64 and no rounding to a storage dtype at all; outputs are float64. The oracle.

Inside, a float value is held in the arithmetic dtype whatever its IR dtype (a rounded bf16 is exact in f32), with one
torch dim for each *axis* of its type. The number of partial results belongs to a kernel, not to the program: here a
reduction is finished, and comes back as the only one. An empty sum is 0, an empty max -inf, an empty mean NaN, as in
torch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coda.dtypes import F8E4M3, DType, torch_dtype
from coda.errors import CodaError
from coda.ir import Axis, Node, Output, Param, Program, Size
from coda.ops import OPS
from coda.runtime import externs
from coda.runtime.binding import bind, check_operands, evaluate_size, is_broadcast_vector, shapes_of, type_shape
from coda.runtime.philox import uniform, uniform_at

E4M3_OVERFLOW = 464.0  # rounds to 448, the largest value; anything above rounds to 480, whose code is NaN

Value: TypeAlias = "Tensor | float | int | None"


def evaluate(
    program: Program,
    inputs: Mapping[str, Value],
    *,
    arithmetic: torch.dtype = torch.float32,
    exact: bool = False,
    device: torch.device | str | None = None,
    dims: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """The outputs of a program by name: contiguous, one torch dim for each dim of the output's type (groups
    flattened), in its dtype (float64 where ``exact``); in front of partial results a dim of size 1.

    ``inputs`` are tensors of the declared dtypes with any strides, on one device; scalars may be Python numbers and
    absent optional operands None. They are never written: an inout output is returned as a new tensor. ``dims`` gives
    axis sizes that the shapes do not tell. Raises CodaError for operands that do not fit the program.
    """
    check_operands(program, inputs)
    sizes = bind(program, shapes_of(inputs), dims)
    return evaluate_sized(program, inputs, sizes, arithmetic=arithmetic, exact=exact, device=device)


def evaluate_sized(
    program: Program,
    inputs: Mapping[str, Value],
    sizes: Mapping[str, int],
    *,
    arithmetic: torch.dtype = torch.float32,
    exact: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """``evaluate`` on operands that were checked and bound before: ``sizes`` is what ``bind`` returned."""
    home = torch.device(device if device is not None else _device_of(inputs))
    context = Context(program, inputs, sizes, torch.float64 if exact else arithmetic, exact, home)
    with torch.no_grad(), _ieee_f32():
        values = run_nodes(program, context)
        return {o.name: context.finish(o, values[o.value]) for o in program.outputs}


def run_nodes(program: Program, context: Context) -> dict[Node, Any]:
    """Values of all nodes that are outputs; the others are dropped after their last use."""
    nodes = program.nodes()
    uses = Counter(arg for node in nodes for arg in node.args)
    uses.update(o.value for o in program.outputs)
    values: dict[Node, Any] = {}
    for node in nodes:
        values[node] = OPS[node.op].torch(context, node, *(values[a] for a in node.args))
        for arg in node.args:
            uses[arg] -= 1
            if not uses[arg]:
                del values[arg]
    return values


class Context:
    """What the torch references of ``coda.ops`` may ask for. See ``evaluate`` for the modes."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, Value],
        sizes: Mapping[str, int],
        arithmetic: torch.dtype,
        exact: bool,
        device: torch.device,
    ):
        self.program, self.inputs, self.sizes = program, inputs, sizes
        self.arithmetic, self.exact, self.device = arithmetic, exact, device
        self.called: dict[Any, tuple[Tensor, ...]] = {}  # results of opaque calls

    # Leaves.

    def input(self, node: Node) -> Tensor | None:
        """The parameter with one dim for each axis; None where an optional one is absent."""
        param = self.program.param(node.attr("name"))
        value = self.inputs.get(param.name)
        if value is None:
            value = param.default
        return None if value is None else self._load(param, value)

    def _load(self, param: Param, value: Tensor | float | int) -> Tensor:
        tensor = torch.as_tensor(value, dtype=torch_dtype(param.type.dtype), device=self.device)
        shape = self.shape(param.type.axes)
        if param.type.partial:
            shape = [tensor.shape[0], *shape]
        if is_broadcast_vector(param, tensor.shape):
            return self.compute(tensor.reshape(()), param.type.dtype).expand(shape)
        return self.compute(tensor, param.type.dtype).reshape(shape)

    def constant(self, node: Node) -> Tensor:
        return self.scalar(node.attr("value"), node)

    def scalar(self, value: float | int | bool, node: Node) -> Tensor:
        """A 0-dim tensor in the dtype in which values of the node's type are held."""
        return torch.tensor(value, dtype=self.held(node.dtype), device=self.device)

    def arange(self, axis: Axis) -> Tensor:
        return torch.arange(self.size(axis.size), device=self.device)

    def philox(self, seed: int, offset: int, sizes: Sequence[int]) -> Tensor:
        return uniform(seed, offset, list(sizes), self.device).to(self.arithmetic)

    def philox_at(self, seed: int, offset: int, position: Tensor) -> Tensor:
        return uniform_at(seed, offset, position).to(self.arithmetic)

    def default(self, node: Node, x: Tensor | None) -> Tensor:
        """The operand, or the identity of the operation it stands in."""
        if x is not None:
            return x
        return self.scalar(node.attr("identity"), node).expand(self.shape(node.type.axes))

    def rows(self, node: Node, table: Tensor, position: int, index: Tensor) -> Tensor:
        """What a gather selects of a table along dim ``position``. Raises CodaError for an index outside of it."""
        size = table.shape[position]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
            raise CodaError.of(f"an index into axis '{node.attr('axis')}' lies outside 0..{size - 1}")
        return table.index_select(position, index)

    # Sizes and dtypes.

    def size(self, size: Size) -> int:
        return evaluate_size(size, self.sizes)

    def shape(self, axes: Sequence[Axis]) -> list[int]:
        return [self.size(a.size) for a in axes]

    def held(self, dtype: DType) -> torch.dtype:
        """The torch dtype in which values of an IR dtype are held: floats in the arithmetic dtype."""
        return self.arithmetic if dtype.kind == "float" else torch_dtype(dtype)

    def compute(self, x: Tensor, dtype: DType) -> Tensor:
        return x.to(self.held(dtype))

    def round(self, x: Tensor, dtype: DType, saturate: bool = False) -> Tensor:
        """A cast: round to nearest, ties to even (to integers too); in exact mode floats are at most clamped."""
        if dtype.kind == "bool":
            return x.to(torch.bool)
        if saturate:
            limits = (torch.finfo if dtype.kind == "float" else torch.iinfo)(torch_dtype(dtype))
            x = x.clamp(limits.min, limits.max)
        elif dtype is F8E4M3 and not self.exact:  # the format has no infinity; torch saturates or not, by version
            x = torch.where(x.abs() > E4M3_OVERFLOW, float("nan"), x)
        if dtype.kind == "int":
            return (x.round() if x.is_floating_point() else x).to(torch_dtype(dtype))
        return x.to(self.arithmetic) if self.exact else self.compute(x.to(torch_dtype(dtype)), dtype)

    # Axes.

    def align(self, node: Node, xs: Sequence[Tensor]) -> list[Tensor]:
        """Operands of an elementwise node over the node's axes (size 1 where they lack one).

        Arithmetic operands are converted to the dtype the result is held in, so that a bool counts as 0 or 1. The
        operands of a comparison stay as they are: i64 positions compare exactly.
        """
        aligned = [self.align_axes(x, a.type.axes, node.type.axes) for x, a in zip(xs, node.args, strict=True)]
        if node.dtype.kind == "bool":
            return aligned
        condition = node.op == "where"
        return [x if condition and i == 0 else self.compute(x, node.dtype) for i, x in enumerate(aligned)]

    def align_axes(self, x: Tensor, axes: Sequence[Axis], target: Sequence[Axis]) -> Tensor:
        """A view of x (one dim for each of ``axes``) with one dim for each of ``target``, matched by name; size 1
        where x lacks the axis."""
        names = [a.name for a in axes]
        order = [names.index(a.name) for a in target if a.name in names]
        x = x.permute(order)
        for position, axis in enumerate(target):
            if axis.name not in names:
                x = x.unsqueeze(position)
        return x

    def expand(self, x: Tensor, axes: Sequence[Axis], target: Sequence[Axis]) -> Tensor:
        """``align_axes``, repeated (without copy) over the axes that x lacks."""
        return self.align_axes(x, axes, target).expand(self.shape(target))

    def contract(self, a: Tensor, b: Tensor, node: Node) -> Tensor:
        """The product of two values over the last dim of one and the last but one of the other, in their dtype."""
        left, right = (x.reshape(type_shape(arg.type, self.sizes)) for x, arg in zip((a, b), node.args, strict=True))
        return (left @ right).reshape(self.shape(node.type.axes))

    def call(self, node: Node, operands: Sequence[Tensor]) -> Tensor:
        """One result of an opaque call, which is made once for all of them; rounded to its dtype."""
        callee = node.attr("callee")
        if (callee, node.args) not in self.called:
            shaped = [x.reshape(type_shape(a.type, self.sizes)) for x, a in zip(operands, node.args, strict=True)]
            types = [OPS["call"].infer([a.type for a in node.args], {"callee": callee, "result": i})
                     for i in range(len(callee.results))]  # fmt: skip
            shapes = [self.shape(t.axes) for t in types]
            self.called[callee, node.args] = externs.call(callee, shaped, shapes)
        return self.round(self.called[callee, node.args][node.attr("result")], node.dtype)

    # Outputs.

    def finish(self, output: Output, x: Tensor) -> Tensor:
        """The stored form of an output, accumulated into its inout parameter where it has one."""
        x = self.align_axes(x, output.value.type.axes, output.type.axes)
        x = x.expand(self.shape(output.type.axes)).reshape(type_shape(output.type, self.sizes))
        if output.is_partial:
            x = x.unsqueeze(0)
        if output.into is not None:
            param = self.program.param(output.into)
            before = self._load(param, self._required(param)).reshape(x.shape)
            x = self.round(before + x, output.type.dtype)
        stored = torch.float64 if self.exact and output.type.dtype.kind == "float" else torch_dtype(output.type.dtype)
        return self.copied(output, x, stored)

    def copied(self, output: Output, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A result as the caller gets it: contiguous, in memory of its own."""
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def _required(self, param: Param) -> Tensor | float | int:
        value = self.inputs.get(param.name)
        if value is None:
            raise CodaError.of(f"operand '{param.name}' is missing: the program accumulates into it")
        return value


def _device_of(inputs: Mapping[str, Value]) -> torch.device:
    """The device of the first operand with dims (scalars may be on the CPU), else of any tensor, else the CPU."""
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    return next((x.device for x in sorted(tensors, key=lambda x: x.dim() == 0)), torch.device("cpu"))


@contextlib.contextmanager
def _ieee_f32() -> Iterator[None]:
    """Products in true f32: a user's TF32 setting must not change what a program means."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
