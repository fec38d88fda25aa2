"""Random layers of Transformers, as program text, through every pass and the lowering, against autograd in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coda.ir import Program
from coda.passes import derive, partition
from coda.passes.kernels import assemble
from coda.passes.simplify import simplify
from coda.runtime.binding import bind, shapes_of
from coda.runtime.blocks import evaluate_partition
from coda.runtime.gradients import random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import lower_program
from tests.gradients import autograd
from tests.support import program, same

SIZES = {"M": 6, "B": 2, "T": 3, "D": 16, "A": 8, "F": 24, "R": 4, "HQ": 4, "HK": 2, "P": 7}
NORMS = (
    "{x}",
    "rms_norm({x}, {g}, 1e-5)",
    "rms_norm({x}, {g}, 1e-5, offset=1)",
    "rms_norm_rounded({x}, {g}, 1e-5, bf16)",
    "layer_norm({x}, {g}, {b}, 1e-5)",
    "{x} * rsqrt(mean({x} * {x}, {axis}) + 0.01)",
)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "quick_gelu", "tanh")


class Writer:
    """Writes one to two sublayers around a residual stream x over the axis D, and perhaps a projection to heads."""

    def __init__(self, random: Random):
        self.random = random
        self.rows = random.choice(["M", "(B T)"])
        self.params: dict[str, str] = {}
        self.lines: list[str] = []
        self.results: list[str] = []

    def text(self) -> str:
        x = self.param("x", f"bf16[{self.rows}, D]")
        for _ in range(self.random.choice([1, 1, 2])):
            x = self.random.choice([self.attention_output, self.mlp, self.mlp])(x)
        if self.rows != "M" and self.chance(0.4):
            self.heads(x)
        if not self.results or self.chance(0.3):
            self.results.append(f"out = cast({x}, bf16)")
        lines = [*self.lines, f"return {', '.join(self.results)}"]
        return f"program layer({', '.join(self.params.values())}) {{\n    " + "\n    ".join(lines) + "\n}\n"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def param(self, name: str, type_: str, frozen: bool = False) -> str:
        self.params.setdefault(name, f"{'const ' * frozen}{name}: {type_}")
        return name

    def weight(self, *axes: str) -> str:
        return self.param(f"w{len(self.params)}", f"bf16[{', '.join(axes)}]", self.chance(0.2))

    def vector(self, axis: str) -> str:
        return self.param(f"g{len(self.params)}", f"{self.random.choice(['bf16', 'f32'])}[{axis}]", self.chance(0.2))

    def let(self, value: str, rounded: bool) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = cast({value}, bf16)" if rounded else f"{name} = {value}")
        return name

    def norm(self, x: str, axis: str = "D") -> str:
        text = self.random.choice(NORMS)
        g, b = (self.vector(axis) if name in text else "" for name in ("{g}", "{b}"))
        return self.let(text.format(x=x, g=g, b=b, axis=axis), self.chance(0.5))

    def linear(self, x: str, axis: str, into: str) -> str:
        value = f"{x} @ {self.weight(into, axis)}.T" if self.chance(0.7) else f"{x} @ {self.weight(axis, into)}"
        if self.chance(0.15):
            scale = self.random.choice(["", "2 * ", "0.3 * "])
            value = f"({value} + {scale}({x} @ {self.weight('R', axis)}.T) @ {self.weight(into, 'R')}.T)"
        return f"({value} + {self.vector(into)})" if self.chance(0.25) else f"({value})"

    def added(self, x: str, value: str) -> str:
        """To the residual, perhaps through a norm or a scale of its own."""
        if self.chance(0.3):
            value = self.norm(self.let(value, True))
        if self.chance(0.2):
            value = f"{self.vector('D')} * {value}"
        return self.let(f"{x} + {value}", True)

    def attention_output(self, x: str) -> str:
        o = self.param(f"o{len(self.params)}", f"bf16[{self.rows}, A]")
        return self.added(x, self.linear(o, "A", "D"))

    def mlp(self, x: str) -> str:
        n = self.norm(x)
        y = f"{self.random.choice(ACTIVATIONS)}{self.linear(n, 'D', 'F')}"
        if self.chance(0.5):
            y = f"{y} * {self.linear(n, 'D', 'F')}"
        y = self.let(y, self.chance(0.5))
        return self.added(x, self.linear(self.norm(y, "F") if self.chance(0.15) else y, "F", "D"))

    def heads(self, x: str) -> None:
        n, g, rotated = self.norm(x), self.vector("d") if self.chance(0.4) else None, self.chance(0.7)
        for name, heads in (("q", "HQ"), ("k", "HK"), ("v", "HK")):
            value = f"{n} @ {self.weight(f'({heads} d=16)', 'D')}.T"
            if name != "v" and g is not None:
                value = f"rms_norm({value}, {g}, 1e-5)"
            if name != "v" and rotated:
                pos, cos, sin = (
                    self.param("pos", "i32[(B T)]"),
                    *(self.param(t, "f32[P, f=8]", True) for t in ("cos", "sin")),
                )
                value = f"rope_half({value}, {cos}[{pos}], {sin}[{pos}])"
            self.results.append(f"{name} = {value}: bf16[B, {heads}, T, d]")


def is_cut_and_lowered(p: Program, sizes: dict[str, int]) -> None:
    """Kernels make up the program again and give its bits; each can be lowered."""
    lower_program(p)
    parts = partition(p)
    assert simplify(assemble(parts)) == simplify(parts.program)
    inputs = random_inputs(p, known(p, sizes), 1)
    got, want = (
        f(x, inputs, dims=known(p, sizes)) for f, x in ((evaluate_partition, parts), (evaluate, parts.program))
    )
    assert all(same(got[n], want[n]) for n in want)


def known(p: Program, sizes: dict[str, int]) -> dict[str, int]:
    needed = {s.name for a in p.axes for s in a.size.free_symbols}
    return {n: s for n, s in sizes.items() if n in needed}


@pytest.mark.parametrize("memory", ["fast", "low"])
@settings(max_examples=6, deadline=None)
@given(st.randoms(use_true_random=False))
def test_layers(memory, random):
    p = program(Writer(random).text())
    inputs = random_inputs(p, known(p, SIZES), 0)
    sizes = bind(p, shapes_of(inputs), known(p, SIZES))
    backward, _ = derive(p, memory=memory)
    is_cut_and_lowered(backward.forward, sizes)
    is_cut_and_lowered(backward.backward, sizes)
    seeds = random_seeds(p, backward.backward, sizes, 0)
    want = autograd(p, inputs, seeds, sizes)
    both = backward.joined()
    got = evaluate(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, exact=True, dims=known(both, sizes))
    for param, output in backward.gradients.items():
        torch.testing.assert_close(got[output], want[param], rtol=1e-6, atol=1e-8)
