"""Partial results as a type: a program leaves them, another declares and finishes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import coda
from coda.errors import CodaError
from coda.ir import Partial, Program
from coda.passes import derive
from coda.printer import print_program
from coda.runtime.reference import evaluate
from coda.target import lower
from coda.target.blocks import lower_noting, lower_program
from coda.target.legality import checks
from tests.hostmath import compile_plan
from tests.support import same_bits

EXAMPLES = Path(__file__).parents[2] / "examples"
MLP = """program mlp(h: bf16[M, D], stats: partial[sum, D] f32[M], g: bf16[D], w_gate: bf16[F, D], w_up: bf16[F, D],
            w_down: bf16[D, F]) {
    n = h * rsqrt(finish(stats) / size(D) + 1e-5) * g
    y = silu(n @ w_gate.T) * (n @ w_up.T)
    out = cast(h + y @ w_down.T, bf16)
    return out, sums = partial(sum(out * out, D)): f32
}"""
HEADS = """program heads(h: bf16[(B T), D], stats: partial[sum, D] f32[(B T)], w: bf16[(G d=64), D], eps: f32 = 1e-6) {
    return q = rsqrt(finish(stats) / size(D) + eps) * (h @ w.T): bf16[B, G, T, d]
}"""


def example(name: str) -> Program:
    return coda.parse(EXAMPLES / f"{name}.coda").programs[name]


def program(parameter: str) -> Program:
    text = f"program p(x: bf16[M, K], w: bf16[N, K], s: {parameter}) {{\n    return y = finish(s) * (x @ w.T): f32\n}}"
    return coda.parse(text).programs["p"]


def operands(count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 32, generator=generator).bfloat16() for n in (7, 6))
    return x, w, torch.rand(count, 7, generator=generator)


def test_the_type_says_of_what_they_are_parts():
    reader = example("swiglu_stats")
    stats = reader.param("stats").type
    assert str(stats) == "partial[sum, D] f32[M]"
    assert stats.partial == Partial("sum", reader.param("n").type.dims[1])
    assert [str(o.type) for o in example("residual_stats").outputs if o.is_partial] == [str(stats)]


@pytest.mark.parametrize("reduction", ["sum, K", "max, (K N)", "min, (p=2 K)"])
def test_printed_and_read_back(reduction: str):
    parameter = f"partial[{reduction}] f32[M]"
    found = program(parameter)
    text = print_program(found)
    assert f"s: {parameter}" in text
    assert coda.parse(text).programs["p"] == found


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_generated_math_finishes_them(kind: str):
    """As many as there are, also more than threads share a row; in order, so that equal partials give equal bits."""
    run = compile_plan(lower(program(f"partial[{kind}, K] f32[M]")))
    for count in (1, 2, 5, 16, 17, 32):
        x, w, s = operands(count)
        got = run({"x": x, "w": w, "s": s})["y"]
        finished = {"sum": s.sum(0), "max": s.amax(0), "min": s.amin(0)}[kind]
        torch.testing.assert_close(got, finished[:, None] * (x.float() @ w.float().T), rtol=1e-6, atol=1e-6)
        padded = torch.full((count, 12), float("nan"))
        padded[:, 2:9] = s
        assert same_bits(got, run({"x": x, "w": w, "s": padded[:, 2:9]})["y"])


def test_one_program_after_the_other():
    """What the first returns, the second takes: on any device, of any number of tiles."""
    first = coda.compile(EXAMPLES / "residual_stats_aux.coda")
    second = coda.compile(EXAMPLES / "swiglu_stats.coda")
    generator = torch.Generator().manual_seed(1)
    o, w, x, gamma, gate, up = (
        torch.randn(*s, generator=generator).bfloat16() for s in ((5, 16), (32, 16), (5, 32), (32,), (8, 32), (8, 32))
    )
    h, n, stats = first(o, w, x, gamma)
    assert stats.shape == (1, 5)
    y, r = second(n, stats, gate, up)
    normed = torch.nn.functional.rms_norm(h.double(), (32,), gamma.double(), 1e-5)
    want = torch.nn.functional.silu(normed @ gate.double().T) * (normed @ up.double().T)
    assert (y.double() - want).norm() / want.norm() < 1e-2
    torch.testing.assert_close(r.double(), (h.double().square().mean(1) + 1e-5).rsqrt(), rtol=1e-6, atol=0)


def test_leading_dims_of_the_other_operands():
    f = coda.compile(EXAMPLES / "swiglu_stats.coda")
    n, w = torch.randn(2, 3, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    stats = torch.rand(4, 6)
    y, r = f(n, stats, w, w)
    assert y.shape == (2, 3, 8) and r.shape == (2, 3)
    flat, _ = f(n.reshape(6, 32), stats, w, w)
    assert torch.equal(y.reshape(6, 8), flat)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7,), "1 dims (shape [7]); partial[sum, K] f32[M] has 2: partial results, as many as there are, lie in front"),
        ((7, 5), "shape [7, 5], expected partial[sum, K] f32[M] = [partials, 7]: dim 1 is 5, not 7"),
        ((0, 7), "shape [0, 7]: dim 0 counts partial results of partial[sum, K]: there are 1 to 32"),
        ((33, 7), "shape [33, 7]: dim 0 counts partial results of partial[sum, K]: there are 1 to 32"),
    ],
)
def test_other_shapes_are_refused(shape: tuple[int, ...], message: str):
    x, w, _ = operands()
    with pytest.raises(CodaError) as caught:
        evaluate(program("partial[sum, K] f32[M]"), {"x": x, "w": w, "s": torch.ones(shape)})
    assert message in str(caught.value)


def test_an_axis_that_no_operand_has_is_a_warning():
    """Nothing can be said of the number of partial results there, but it runs."""
    module = coda.parse("program p(x: bf16[M, K], w: bf16[N, K], s: partial[sum, Q] f32[M]) {\n"
                        "    return finish(s) * (x @ w.T): f32\n}")  # fmt: skip
    assert [d.message for d in module.warnings] == ["no operand has axis 'Q'"]
    x, w, s = operands()
    assert evaluate(module.programs["p"], {"x": x, "w": w, "s": s})["out"].shape == (7, 6)


def test_the_gradient_of_a_sum_is_that_of_each_part():
    """So the derived backwards of reader and writer chain: d_stats is one value for each row in both."""
    backward = derive(example("swiglu_stats"))[0].backward
    assert "d_stats" in {o.name for o in backward.outputs}
    assert next(str(o.type) for o in backward.outputs if o.name == "d_stats") == "f32[M]"
    upstream = derive(example("residual_stats_aux"))[0].backward
    assert str(upstream.param("d_stats").type) == "f32[M]"
    with pytest.raises(CodaError, match=r"parameter 's' is partial\[max, K\] f32\[M\] and has no gradient"):
        derive(program("partial[max, K] f32[M]"), ["s"])


def test_gradients_of_writer_and_reader_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(3)
    shapes = {"o": (5, 16), "w": (32, 16), "x": (5, 32), "gamma": (32,), "w_gate": (8, 32), "w_up": (8, 32)}
    leaves = {k: torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_() for k, s in shapes.items()}
    h = leaves["x"] + leaves["o"] @ leaves["w"].T
    n = torch.nn.functional.rms_norm(h, (32,), leaves["gamma"], 1e-5)
    y = torch.nn.functional.silu(n @ leaves["w_gate"].T) * (n @ leaves["w_up"].T)
    d_y = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    wanted = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), d_y), strict=True))
    given = {k: v.detach() for k, v in leaves.items()}

    def gradients(name: str, inputs: dict, upstream: dict) -> dict[str, Tensor]:
        joined = derive(example(name))[0].joined()
        known = {p.name for p in joined.params}
        zeros = {p.name: torch.zeros(5) for p in joined.params if p.name == "d_r"}
        rounded = {k: v for k, v in (inputs | upstream | zeros).items() if k in known}
        return evaluate(joined, as_declared(joined, rounded), exact=True)

    def as_declared(p, values: dict) -> dict:
        return {k: v.to(getattr(torch, p.param(k).type.dtype.torch)) for k, v in values.items()}

    writer = example("residual_stats_aux")
    made = evaluate(writer, as_declared(writer, {k: given[k] for k in ("o", "w", "x", "gamma")}), exact=True)
    inner = gradients("swiglu_stats", given | {"n": made["scaled"], "stats": made["stats"]}, {"d_y": d_y})
    upstream = {"d_scaled": inner["d_n"], "d_stats": inner["d_stats"], "d_h": torch.zeros(5, 32)}
    outer = gradients("residual_stats_aux", given, upstream)
    for name, want in wanted.items():
        got = (inner | outer)[f"d_{name}"]
        assert (got - want).norm() / want.norm() < 3e-2, name  # operands and edges are bf16


def test_a_head_wise_epilogue_finishes_them():
    found = coda.parse(HEADS).programs["heads"]
    (read,) = (o for o in lower(found).operands if o.partial)
    assert (read.arg, read.walk.row, read.walk.column) == ("stats", 1, 0)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("partial[sum, K] f32[N]", r"'s' is partial\[sum, K\] f32\[N\]; an epilogue finishes"),
        ("partial[logsumexp, K] f32[M]", "a partial of 'logsumexp' is 2 values"),
    ],
)
def test_what_no_kernel_finishes_is_refused(parameter: str, message: str):
    with pytest.raises(CodaError, match=message):
        lower_program(program(parameter))


def test_a_block_delays_the_norm_that_they_belong_to():
    """No kernel takes statistics of h; the next block gets what this one leaves."""
    lowered = lower_noting(coda.parse(MLP).programs["mlp"])
    assert [step.kind for step in lowered.schedule.steps] == ["map", "gemm", "gemm"]
    assert [[o.arg for o in step.operands if o.partial] for step in lowered.schedule.gemms] == [["stats"], []]
    checks(lowered.schedule)


def test_a_kernel_over_rows_finishes_them():
    text = "program final_norm(h: bf16[M, D], stats: partial[sum, D] f32[M], g: bf16[D]) {\n" \
           "    return n = h * rsqrt(finish(stats) / size(D)) * g: bf16\n}"  # fmt: skip
    (step,) = lower_program(coda.parse(text).programs["final_norm"]).steps
    assert step.kind == "map"
    by_column = text.replace("partial[sum, D] f32[M]", "partial[sum, M] f32[D]")
    with pytest.raises(CodaError, match="finished for each row, and these vary over columns"):
        lower_program(coda.parse(by_column).programs["final_norm"])
