"""A program as it runs without us: products by cuBLAS, and separate kernels around them.

What a fused kernel has to beat, and what takes its place where it does not. The roundings are those of eager PyTorch
(``round_as_eager``); 16-bit values are kept in their dtype, so that ``torch.matmul`` gets them as they are. On a GPU
Inductor makes kernels of what is around the products; where it cannot, torch runs operation by operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import DType, torch_dtype
from coda.ir import Node, Output, Program
from coda.ops import OPS
from coda.passes.eager import round_as_eager
from coda.runtime.device import capturing
from coda.runtime.inputs import source_of
from coda.runtime.reference import Context, Value, run_nodes

COMPILED = 16  # operand layouts that kernels are made for; further ones run operation by operation
Function = Callable[..., tuple[Tensor, ...]]


class Unfused:
    """Call it with the operands by name and the sizes of the axes; gives the outputs by name, as ``evaluate`` does."""

    def __init__(self, program: Program, use_inductor: bool | None = None):
        self.program = round_as_eager(program)
        self.use_inductor = use_inductor  # None: on a GPU
        self._compiled: dict[tuple, Function] = {}

    def __call__(self, inputs: Mapping[str, Value], sizes: Mapping[str, int]) -> dict[str, Tensor]:
        tensors = {n: x for n, x in inputs.items() if isinstance(x, Tensor)}
        scalars = {n: x for n, x in inputs.items() if not isinstance(x, Tensor)}
        key = (tuple((n, x.dtype, x.shape, x.stride(), x.device) for n, x in tensors.items()), *scalars.items())
        with torch.no_grad(), torch._C._DisableAutocast():  # the program says its dtypes
            known = self._compiled.get(key)
            function = self._made(key, tensors, scalars, sizes) if known is None else known
            return dict(zip((o.name for o in self.program.outputs), function(*tensors.values()), strict=True))

    @property
    def how(self) -> str:
        """What the last layouts ran as."""
        return "torch.compile" if self._compiled else "eager torch"

    def _made(
        self, key: tuple, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> Function:
        function = self._eager(list(tensors), scalars, sizes)
        device = next((x.device.type for x in tensors.values() if x.dim()), "cpu")
        wanted = device == "cuda" if self.use_inductor is None else self.use_inductor
        if wanted and self._may_compile():
            try:
                function = _compiled(function, list(tensors.values()))
            except Exception:  # Inductor, or the compilers it needs: whatever it is, torch runs without them
                self.use_inductor = False
            else:
                self._compiled[key] = function
        return function

    def _may_compile(self) -> bool:
        """Random numbers come of a seed, which is new in each call and would be a constant of the kernels."""
        seeded = any(OPS[n.op].family == "random" for n in self.program.nodes())
        return not seeded and not capturing() and len(self._compiled) < COMPILED

    def _eager(self, names: list[str], scalars: Mapping[str, Any], sizes: Mapping[str, int]) -> Function:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            device = next((x.device for x in tensors if x.dim()), torch.device("cpu"))
            inputs = {**dict(zip(names, tensors, strict=True)), **scalars}
            context = Native(self.program, inputs, sizes, torch.float32, False, device)
            values = run_nodes(self.program, context)
            return tuple(context.finish(o, values[o.value]) for o in self.program.outputs)

        return run


class Native(Context):
    """16-bit floats are held as they are stored, and only what is written is copied."""

    def held(self, dtype: DType) -> torch.dtype:
        return torch_dtype(dtype) if dtype.kind == "float" and dtype.bits == 16 else super().held(dtype)

    def rows(self, node: Node, table: Tensor, position: int, index: Tensor) -> Tensor:
        """As kernels do it: without looking at the index first; NaN, or 0 in integers, where it lies outside."""
        size = table.shape[position]
        inside = (index >= 0) & (index < size)
        inside = inside.reshape([-1 if i == position else 1 for i in range(table.dim())])
        found = table.index_select(position, index.clamp(0, max(size - 1, 0)))
        return torch.where(inside, found, float("nan") if table.is_floating_point() else 0)

    def copied(self, output: Output, x: Tensor, dtype: torch.dtype) -> Tensor:
        stored = Counter(o.value for o in self.program.outputs)
        may_alias = source_of(output.value).op == "input" or stored[output.value] > 1
        return super().copied(output, x, dtype) if may_alias else x.to(dtype).contiguous()


def _compiled(function: Function, tensors: list[Tensor]) -> Function:
    """Inductor's kernels for operands of these layouts; compiled, and run once, before it is returned."""
    compiled = torch.compile(traced(function, tensors), dynamic=False)
    compiled(*tensors)
    return compiled


def traced(function: Function, tensors: list[Tensor]) -> Function:
    """A function as a graph of torch operations; the interpreter's own work is done."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*tensors)
