"""Many rows of the table at once: every kind of epilogue, over sizes that divide nothing and layouts that nobody asked
for, through the checks that a launcher makes and the generated math that a kernel runs.

Of each call: results inside the error gate, operands as they were, the same bits once more, and no surprise: it runs
the kernel, on copies of the operands that it names, or says why it cannot.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

import coda
from coda.ir import Program
from coda.runtime.callable import CompiledProgram
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.target import lower
from tests.hostmath import HostProgram, compile_plans
from tests.support import LAYOUTS, PredicateArtifact, laid_out, same_bits

TEXT = """
program activation(x: bf16[M, K], w: bf16[N, K], bias: f32[N]?, const act: {gelu_erf, silu} = gelu_erf) {
    return y = act(x @ w.T + bias): f16
}
program residual(x: f16[M, K], w: f16[N, K], c: f32[M, N], gamma: bf16[N]) {
    return y = c + gamma * (x @ w.T): bf16
}
program scaled(x: bf16[M, K], w: bf16[N, K], r: f16[M], c: bf16[N], s: f32) {
    return y = where(s * r * (x @ w.T) > c, x @ w.T, c - r): f32
}
program gated(x: bf16[M, K], wg: bf16[N, K], wu: bf16[N, K], r: f32[M]) {
    g = r * (x @ wg.T)
    u = r * (x @ wu.T)
    return y = silu(g) * u: bf16, z = stack(g, u, s): f16[M, (s N)]
}
program statistics(x: bf16[M, K], w: bf16[N, K], c: bf16[M, N]) {
    h = x @ w.T + c
    return h: f32, rstd = rsqrt(mean(h * h, N) + 1e-3): f32, top = max(h, N): bf16, parts = partial(sum(h * h, N)): f32,
        bias = sum(h, M): f32, low = min(h, M): bf16
}
program totals(x: f16[M, K], w: f16[N, K]) {
    y = x @ w.T
    return y: f32, amax = max(abs(y), (M N)): f32, norm = sum(y * y, (M N)): f32
}
program loss(x: bf16[M, K], w: bf16[N, K], label: i64[M], weight: f32[M]?) {
    z = x @ w.T
    lse = logsumexp(z, N)
    return nll = (lse - pick(z, N, label)) * weight: f32, lse: f32
}
program quantised(x: bf16[M, K], w: bf16[N, K], scale: f32) {
    return y = cast((x @ w.T) / scale, f8e4m3, saturate): f8e4m3, z = cast(8 * (x @ w.T), s8, saturate): s8
}
program dropped(x: bf16[M, K], w: bf16[N, K], c: bf16[M, N], seed: i64[], offset: i64[]) {
    return y = c + where(rand(seed, offset, [M, N]) >= 0.25, (x @ w.T) / 0.75, 0): bf16
}
program finished(x: bf16[M, K], stats: partial[sum, K] f32[M], w: bf16[N, K], eps: f32 = 1e-5) {
    r = rsqrt(finish(stats) / size(K) + eps)
    return y = r * (x @ w.T): bf16, r: f32
}
program accumulated(dy: bf16[K, M], x: bf16[K, N], inout dw: f32[M, N]) {
    dw += dy.T @ x
}
program transposed(x: bf16[M, K], w: bf16[K, N], c: bf16[M, N]) {
    y = x @ w + c
    return y: bf16[N, M], z = 2 * y: f32
}
"""
SIZES = (
    (0, 8, 8), (1, 10, 10), (4, 82, 64), (7, 256, 3520), (128, 257, 8), (129, 8, 64), (4096, 10, 8), (7, 82, 10),
    (1, 257, 64), (129, 256, 10), (4, 8, 3520), (128, 82, 8),
)  # fmt: skip
PAIRED = "the columns paired at a time"  # gated takes a multiple of eight


class HostArtifact(PredicateArtifact):
    """Accepts what ``can_lower`` accepts, and computes with the generated math."""

    def __init__(self, program: Program, host: HostProgram):
        super().__init__(program)
        self.host = host

    def output_shapes(self, sizes):
        shapes = super().output_shapes(sizes)
        counts = {o.name: -(-sizes["N"] // 128) for o in self.program.outputs if o.is_partial}
        return {name: (counts[name], *shape) if name in counts else shape for name, shape in shapes.items()}

    def run(self, args, workspace, stream):
        names = [p.name for p in self.program.params] + [o.name for o in self.program.outputs if o.into is None]
        given = dict(zip(names, args, strict=True))
        results = self.host({p.name: given[p.name] for p in self.program.params})
        for output in self.program.outputs:
            target = given[output.into or output.name]
            if output.is_partial:  # one of many holds the sum, the others nothing
                target.zero_()
                target = target[:1]
            target.copy_(results[output.name])


@cache
def kernels() -> dict[str, CompiledProgram]:
    programs = coda.parse(TEXT).programs
    hosts = compile_plans([lower(p) for p in programs.values()])
    return {
        name: CompiledProgram(p, artifact=HostArtifact(p, host), device_type="cpu")
        for (name, p), host in zip(programs.items(), hosts, strict=True)
    }


def check(name: str, m: int, n: int, k: int, layout: str, optional: bool) -> None:
    call = kernels()[name]
    program = call.program
    inputs = random_inputs(program, {"M": m, "N": n, "K": k}, m + n + k, optional=optional)
    writes = {p.name for p in program.params if p.inout}
    operands = {
        key: laid_out(x, layout) if isinstance(x, Tensor) and key not in writes else x for key, x in inputs.items()
    }
    before = {key: x.clone() for key, x in operands.items() if isinstance(x, Tensor)}

    def run() -> dict[str, Tensor]:
        given = operands | {key: before[key].clone() for key in writes}
        results = call(**given)
        results = () if results is None else results if isinstance(results, tuple) else (results,)
        by_name = dict(zip([o.name for o in program.outputs if o.into is None], results, strict=True))
        return by_name | {key: given[key] for key in writes}

    first, route = run(), call.last_route
    assert route is not None and (route.kind in ("kernel", "copy", "empty") or PAIRED in (route.reason or "")), route
    assert (route.kind == "empty") == (m == 0)
    result = compare(program, before | {key: x for key, x in operands.items() if key not in before}, first)
    assert result.ok, f"{route}\n{result}"
    for key, x in before.items():
        assert same_bits(operands[key], x), f"{key} was modified"
    assert all(same_bits(x, y) for x, y in zip(first.values(), run().values(), strict=True)), "a second call differs"


@pytest.mark.parametrize("name", list(coda.parse(TEXT).programs))
def test_sizes(name: str) -> None:
    """A1 to A5, B1, B2, B5, C8, D1, D2, D7, I1: sizes that divide no tile and no vector; layouts in turn."""
    for i, (m, n, k) in enumerate(SIZES):
        check(name, m, n, k, LAYOUTS[i % len(LAYOUTS)], optional=i % 2 == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", list(coda.parse(TEXT).programs))
def test_layouts(name: str, layout: str) -> None:
    for m, n, k in ((129, 256, 64), (5, 82, 10)):
        check(name, m, n, k, layout, optional=True)
