"""Derived gradients against torch autograd, both in float64 and without rounding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from coda.frontend import load
from coda.ir import Param, Program
from coda.passes.differentiate import Backward, differentiate
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of
from coda.runtime.gradients import autograd, random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import Context, evaluate, run_nodes
from coda.verify import verify


def check_text(program: Program) -> None:
    """The program keeps the rules of the IR, and its text parses back to it."""
    verify(program)
    text = print_program(program)
    again = load(text).programs[program.name]
    assert again == program, text
    assert print_program(again) == text


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
    if not any(note.rule == "steady" for note in backward.notes):  # which adds a rounding
        assert backward.forward.outputs[: len(program.outputs)] == program.outputs
    inputs = random_inputs(program, sizes, seed) if inputs is None else inputs
    sizes = bind(program, shapes_of(inputs), sizes)
    seeds = random_seeds(program, backward.backward, sizes, seed + 1)
    want = autograd(program, inputs, seeds, sizes)
    both = backward.joined()
    known = {n: s for n, s in sizes.items() if n in {s.name for a in both.axes for s in a.size.free_symbols}}
    got = evaluate(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, exact=True, dims=known)
    for param, output in backward.gradients.items():
        expected = want.get(param)
        expected = torch.zeros_like(got[output]) if expected is None else expected
        torch.testing.assert_close(got[output], expected, rtol=rtol, atol=1e-9, msg=lambda m, p=param: f"{p}: {m}")
    return backward


def evaluate_wide(program: Program, inputs: Mapping[str, Any], dims: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The program in float64 on float64 operands, which are not rounded to the dtypes it declares."""

    class Wide(Context):
        def _load(self, param: Param, value: Any) -> torch.Tensor:
            return torch.as_tensor(value).to(self.held(param.type.dtype)).reshape(self.shape(param.type.axes))

    context = Wide(program, inputs, bind(program, shapes_of(inputs), dims), torch.float64, True, torch.device("cpu"))
    with torch.no_grad():
        values = run_nodes(program, context)
        return {o.name: context.finish(o, values[o.value]) for o in program.outputs}


def without_lines(*notes: object) -> str:
    """Notes as comments. Equal values of other programs share nodes, so in a long run of tests a derived value may have
    been written elsewhere first; the places that users see are tested by themselves."""
    return "".join("# " + re.sub(r" \(line [0-9]+\)", "", str(note)) + "\n" for note in notes)
