"""Random programs of several products, norms, residuals and statistics, through every pass."""

from __future__ import annotations

from collections.abc import Collection

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coda.dtypes import BF16, F32, I64
from coda.errors import CodaError
from coda.frontend import expression
from coda.ir import Axis, Node, Output, Param, Program, Type
from coda.ops import build
from coda.passes import derive, optimize
from coda.passes.bare import products
from coda.passes.differentiate import differentiate
from coda.passes.kernels import assemble
from coda.passes.partition import partition
from coda.passes.simplify import simplify
from coda.runtime.binding import bind, shapes_of
from coda.runtime.blocks import evaluate_partition
from coda.runtime.gradients import random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import lower_program
from coda.verify import verify
from tests.gradients import autograd, check_gradients, check_text
from tests.programs import cast
from tests.support import same

SIZES = {"M": 3, "D": 4, "E": 2, "F": 5, "P": 6}
M, P, LANE = Axis.free("M"), Axis.free("P"), Axis.of("s", 2)
FEATURES = [Axis.free(n) for n in "DEF"]
STEPS = {  # how a value of rows comes from values a and b of equal axes, and a vector g over its features
    "rms_norm": "a * rsqrt(mean(a * a, X) + 0.01) * g",
    "layer_norm": "(a - mean(a, X)) * rsqrt(mean((a - mean(a, X)) * (a - mean(a, X)), X) + 0.01) * g + g",
    "silu": "silu(a) * b",
    "residual": "a + b",
    "scale": "a * g",
    "bias": "a + g",
    "softmax": "exp(a - logsumexp(a, X))",
    "row": "a * tanh(sum(b, X))",
    "gelu": "gelu_tanh(a) + relu(b)",
    "shifted": "a - max(a, X)",
    "chosen": "where(a > b, a * g, b)",
    "columns": "a * tanh(mean(b, M))",
}
LANES = {  # of a product with two lanes z: what becomes of them
    "swiglu": ("silu(z.s[0]) * z.s[1]",),
    "rotated": ("z.s[0] * c - z.s[1] * r", "z.s[1] * c + z.s[0] * r"),
    "stacked": ("sum(stack(z.s[1], exp(-z.s[0] * z.s[0]), s), s)",),
    "normalised": ("z.s[1] * rsqrt(mean(z * z, (s X)) + 0.01)", "z.s[0]"),
}


class BlockBuilder:
    def __init__(self, draw):
        self.draw, self.params = draw, []
        self.values = [self.parameter("x", BF16, (M, a)) for a in FEATURES[:2]]

    def parameter(self, stem: str, dtype, axes: tuple[Axis | tuple[Axis, ...], ...], frozen: bool = False) -> Node:
        dims = tuple(a if isinstance(a, tuple) else (a,) for a in axes)
        name, type_ = f"{stem}{len(self.params)}", Type(dtype, dims)
        self.params.append(Param(name, type_, frozen=frozen))
        return build("input", name=name, type=type_)

    def pick(self, axis: Axis | None = None) -> Node:
        fitting = [v for v in self.values if axis is None or v.type.axes[1] == axis]
        return fitting[-1 - min(self.draw(st.integers(0, 3)), len(fitting) - 1)]

    def step(self) -> None:
        a = self.pick()
        axis = a.type.axes[1]
        kind = self.draw(
            st.sampled_from(["product", "product", "lanes", "table", "pointwise", "pointwise", "pointwise"])
        )
        if kind in ("product", "lanes"):
            into = self.draw(st.sampled_from([f for f in FEATURES if f != axis]))
            columns = into if kind == "product" else self.draw(st.sampled_from([(LANE, into), (into, LANE)]))
            w = self.parameter("w", BF16, (columns, axis), frozen=self.draw(st.booleans()))
            left = a if a.dtype == BF16 else cast(a, BF16)
            z = build("dot", left, build("transpose", w))
            self.values += [z] if kind == "product" else self.of_lanes(z, into)
            return
        if kind == "table":  # rows of a table at integer positions
            table, index = self.parameter("t", F32, (P, axis), frozen=True), self.parameter("i", I64, (M,))
            self.values.append(expression("a * t[i]", a=a, t=table, i=index))
            return
        text = self.draw(st.sampled_from(sorted(STEPS.values()))).replace("X", axis.name)
        names = {"a": a, "b": self.pick(axis)}
        if "g" in text.replace("sigmoid", "").replace("logsumexp", ""):
            names["g"] = self.parameter("g", self.draw(st.sampled_from([BF16, F32])), (axis,))
        value = expression(text, **names)
        self.values.append(cast(value, BF16) if self.draw(st.booleans()) else value)

    def of_lanes(self, z: Node, axis: Axis) -> list[Node]:
        texts = [t.replace("X", axis.name) for t in self.draw(st.sampled_from(sorted(LANES.values())))]
        names = {"z": z}
        if any(" c" in t for t in texts):
            names |= {n: self.parameter(n, F32, (M, axis)) for n in "cr"}
        return [expression(t, **names) for t in texts]


@st.composite
def random_block(draw) -> Program:
    builder = BlockBuilder(draw)
    for _ in range(draw(st.integers(2, 9))):
        builder.step()
    results = dict.fromkeys([builder.values[-1], *(builder.pick() for _ in range(draw(st.integers(0, 2))))])
    values = [v if v.dtype == BF16 else cast(v, BF16) for v in results]
    outputs = [Output(f"y{i}", v, v.type) for i, v in enumerate(dict.fromkeys(values))]
    read = {n.attr("name") for n in Program("p", (), tuple(outputs)).nodes() if n.op == "input"}
    return Program.of("block", [p for p in builder.params if p.name in read], outputs)


def is_partitioned(p: Program, seed: int, bare: Collection[int] = ()) -> None:
    """Kernels are programs that make up the program again and give its bits; bare products are rounded."""
    parts = partition(p, bare=bare)
    for kernel in parts.kernels:
        check_text(kernel.program)
    assert simplify(assemble(parts)) == simplify(parts.program)
    needed = {s.name for a in p.axes for s in a.size.free_symbols}
    sizes = {n: s for n, s in SIZES.items() if n in needed}
    inputs = random_inputs(p, sizes, seed)
    whole = parts.program if bare else p
    got, want = (f(x, inputs, dims=sizes) for f, x in ((evaluate_partition, parts), (evaluate, whole)))
    assert all(same(got[n], want[n]) for n in want)


@settings(max_examples=30, deadline=None)
@given(random_block(), st.data())
def test_any_products_may_be_stored_as_they_are(p, data):
    dots = len(products(p))
    bare = data.draw(st.sets(st.integers(0, dots - 1)), label="bare") if dots else set()
    is_partitioned(p, 0, bare=bare)


def has_gradient(p: Program) -> bool:
    try:
        return bool(differentiate(p))
    except CodaError as error:
        if "no output" in str(error):
            return False
        raise


@settings(max_examples=60, deadline=None)
@given(random_block(), st.integers(0, 99))
def test_every_pass(p, seed):
    verify(p)
    is_partitioned(p, seed)
    fused, _ = optimize(p)
    verify(fused)
    is_partitioned(fused, seed)
    needed = {s.name for a in p.axes for s in a.size.free_symbols}
    sizes = {n: s for n, s in SIZES.items() if n in needed}
    inputs = random_inputs(p, sizes, seed)
    for name, y in evaluate(p, inputs, exact=True).items():
        torch.testing.assert_close(evaluate(fused, inputs, exact=True)[name], y, rtol=1e-7, atol=1e-9)
    assume(has_gradient(fused))
    backward = check_gradients(fused, sizes, inputs=inputs, seed=seed, rtol=1e-6)
    is_partitioned(backward.forward, seed)
    rewritten, _ = optimize(backward.backward)
    verify(rewritten)
    is_partitioned(rewritten, seed)
    bound = bind(p, shapes_of(inputs), sizes)
    seeds = random_seeds(p, backward.backward, bound, seed)
    want = autograd(p, inputs, seeds, bound)
    assume(all(g is None or (g.isfinite().all() and g.abs().max() < 1e6) for g in want.values()))
    both = type(backward)(backward.forward, rewritten, backward.saved, backward.gradients).joined()
    got = evaluate(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, exact=True)
    for param, output in backward.gradients.items():
        torch.testing.assert_close(got[output], want[param], rtol=1e-6, atol=1e-8)


@settings(max_examples=12, deadline=None)
@given(random_block(), st.sampled_from(["fast", "low"]))
def test_blocks_and_their_backwards_are_lowered_whole(p, memory):
    lower_program(p)
    if has_gradient(optimize(p)[0]):
        lower_program(derive(p, memory=memory)[0].backward)


@settings(max_examples=40, deadline=None)
@given(random_block(), st.integers(0, 99), st.data())
def test_what_is_not_wanted_costs_nothing(p, seed, data):
    """Any choice of parameters: the same gradients as when all are asked for, and no product for the others: a gradient
    of a weight is the only product that is contracted over the rows."""
    assume(has_gradient(p))
    every = differentiate(p)
    wrt = data.draw(st.lists(st.sampled_from(sorted(every.gradients)), min_size=1, unique=True))
    some = differentiate(p, wrt)
    assert set(some.gradients) == set(wrt)
    weights = [n for n in wrt if n.startswith("w")]
    products = [n for n in some.backward.nodes() if n.op == "dot"]
    over_rows = [n for n in products if M in n.args[0].type.dims[1]]
    assert len(over_rows) <= len(weights)
    assert len(products) <= sum(n.op == "dot" for n in every.backward.nodes())
    needed = {s.name for a in p.axes for s in a.size.free_symbols}
    sizes = {n: s for n, s in SIZES.items() if n in needed}
    inputs = random_inputs(p, sizes, seed)
    seeds = {f"d_{n}": s for n, s in random_seeds(p, every.backward, bind(p, shapes_of(inputs), sizes), seed).items()}
    want, got = (evaluate(b.joined(), {**inputs, **seeds_for(b, seeds)}, exact=True) for b in (every, some))
    for name in wrt:
        torch.testing.assert_close(got[some.gradients[name]], want[every.gradients[name]], rtol=1e-7, atol=1e-9)


def seeds_for(backward, seeds):
    wanted = {q.name for q in backward.joined().params}
    return {n: s for n, s in seeds.items() if n in wanted}
