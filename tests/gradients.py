"""Derived gradients against torch autograd, both in float64 and without rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.frontend import load
from coda.ir import Param, Program
from coda.passes.differentiate import Backward, differentiate
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of, type_shape
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import Context, _run, evaluate
from coda.verify import verify


class Traced(Context):
    """The reference interpreter under autograd: float parameters are leaves."""

    def __init__(self, program: Program, inputs: Mapping[str, Any], sizes: Mapping[str, int]):
        super().__init__(program, inputs, sizes, torch.float64, True, torch.device("cpu"))
        self.leaves: dict[str, Tensor] = {}

    def _load(self, param: Param, value: Any) -> Tensor:
        tensor = super()._load(param, value)
        if param.type.dtype.kind != "float":
            return tensor
        return self.leaves.setdefault(param.name, tensor.clone().requires_grad_())


def autograd(program: Program, inputs: Mapping[str, Any], seeds: Mapping[str, Tensor], sizes: Mapping[str, int]):
    """The gradient of each float parameter from d_y for each output y; None where there is none."""
    context = Traced(program, inputs, sizes)
    values = _run(program, context)
    outputs = {o.name: context.finish(o, values[o.value]) for o in program.outputs}
    loss = sum((outputs[name] * seed.double()).sum() for name, seed in seeds.items())
    names = list(context.leaves)
    grads = torch.autograd.grad(loss, [context.leaves[n] for n in names], allow_unused=True)
    axes = {p.name: p.type for p in program.params}
    return {n: None if g is None else g.reshape(type_shape(axes[n], sizes)) for n, g in zip(names, grads, strict=True)}


def check_text(program: Program) -> None:
    """The program keeps the rules of the IR, and its text parses back to it."""
    verify(program)
    text = print_program(program)
    again = load(text).programs[program.name]
    assert again == program, text
    assert print_program(again) == text


def seeds_for(program: Program, backward: Backward, sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """d_y for each output y of a program, by the name of y."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for output in program.outputs:
        param = next((p for p in backward.backward.params if p.name == f"d_{output.name}"), None)
        if param is not None:
            shape = type_shape(param.type, sizes)
            result[output.name] = torch.randn(shape, generator=generator).to(torch_dtype(param.type.dtype))
    return result


def check_gradients(
    program: Program,
    sizes: Mapping[str, int],
    wrt: Sequence[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    rtol: float = 1e-9,
    **options: Any,
) -> Backward:
    """Differentiate, check the texts, and compare every gradient with autograd."""
    backward = differentiate(program, wrt, **options)
    check_text(backward.forward)
    check_text(backward.backward)
    assert backward.forward.outputs[: len(program.outputs)] == program.outputs
    inputs = random_inputs(program, sizes, seed) if inputs is None else inputs
    sizes = bind(program, shapes_of(inputs), sizes)
    seeds = seeds_for(program, backward, sizes, seed + 1)
    want = autograd(program, inputs, seeds, sizes)
    both = backward.joined()
    known = {n: s for n, s in sizes.items() if n in {s.name for a in both.axes for s in a.size.free_symbols}}
    got = evaluate(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, exact=True, dims=known)
    for param, output in backward.gradients.items():
        expected = want.get(param)
        expected = torch.zeros_like(got[output]) if expected is None else expected
        torch.testing.assert_close(got[output], expected, rtol=rtol, atol=1e-9, msg=lambda m, p=param: f"{p}: {m}")
    return backward
