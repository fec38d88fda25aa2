"""The interpreter under torch autograd: what derived backwards are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.ir import Param, Program
from coda.runtime.binding import type_shape
from coda.runtime.reference import Context, run_nodes


class Traced(Context):
    """The reference interpreter with float parameters as leaves of autograd. A rounding passes gradients on and, as in
    torch, rounds them."""

    def __init__(self, program: Program, inputs: Mapping[str, Any], sizes: Mapping[str, int], exact: bool):
        device = next((x.device for x in inputs.values() if isinstance(x, Tensor) and x.dim()), torch.device("cpu"))
        super().__init__(program, inputs, sizes, torch.float64 if exact else torch.float32, exact, device)
        self.leaves: dict[str, Tensor] = {}

    def _load(self, param: Param, value: Any) -> Tensor:
        tensor = super()._load(param, value)
        if param.type.dtype.kind != "float":
            return tensor
        return self.leaves.setdefault(param.name, tensor.clone().requires_grad_())


def autograd(
    program: Program,
    inputs: Mapping[str, Any],
    seeds: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    exact: bool = True,
) -> dict[str, Tensor | None]:
    """The gradient of each float parameter (of partial sums: that of one) from ``seeds``, d_y by the name of y; None
    where nothing depends on it. ``exact``: in float64 without rounding, else in f32 with the program's roundings."""
    context = Traced(program, inputs, sizes, exact)
    values = run_nodes(program, context)
    outputs = {o.name: context.finish(o, values[o.value]) for o in program.outputs}
    loss = sum(
        (outputs[name].to(context.arithmetic) * seed.to(context.arithmetic)).sum() for name, seed in seeds.items()
    )
    names = list(context.leaves)
    grads = torch.autograd.grad(loss, [context.leaves[n] for n in names], allow_unused=True)
    types = {p.name: p.type for p in program.params}
    ones = {n: g[0] if g is not None and types[n].partial else g for n, g in zip(names, grads, strict=True)}
    return {n: None if g is None else g.reshape(type_shape(types[n], sizes)) for n, g in ones.items()}


def random_seeds(
    program: Program, backward: Program, sizes: Mapping[str, int], seed: int, device: Any = "cpu"
) -> dict[str, Tensor]:
    """A random d_y for each output y of a program that its backward asks for, by the name of y."""
    generator = torch.Generator(device).manual_seed(seed)
    wanted = {p.name: p.type for p in backward.params}
    return {
        o.name: torch.randn(type_shape(wanted[f"d_{o.name}"], sizes), generator=generator, device=device).to(
            torch_dtype(wanted[f"d_{o.name}"].dtype)
        )
        for o in program.outputs
        if f"d_{o.name}" in wanted
    }
