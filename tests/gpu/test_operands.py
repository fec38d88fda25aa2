"""Operands of products in every dtype and layout, sums of products and accumulation into memory: against float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import coda
from coda.runtime.binding import bind, shapes_of
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.target import TILES, lower
from coda.target.legality import legal_tile
from tests.gpu.support import warm_or_skip
from tests.support import same_bits

# Each over M, N, K (and R); one kernel is built for each program and tile.
PROGRAMS = {
    "f16": """
program linear_f16(x: f16[M, K], w: f16[N, K], bias: f16[N]?, r: f16[M, N]) {
    return gelu_tanh(x @ w.T + bias) + r: f16
}""",
    "dgrad": """
program dgrad(dy: bf16[M, K], w: bf16[K, N], c: bf16[N]) {
    return dy @ w + c: bf16
}""",
    "wgrad": """
program wgrad(dy: bf16[K, M], x: bf16[K, N]) {
    return dy.T @ x: f32
}""",
    "wgrad_f16": """
program wgrad_f16(dy: f16[K, M], x: f16[K, N], r: f16[M, N]) {
    return r - dy.T @ x: f16
}""",
    "both_transposed": """
program both_transposed(x: bf16[K, M], w: bf16[N, K]) {
    return x.T @ w.T: bf16
}""",
    "dgrad_gate_up": """
program dgrad_gate_up(dg: bf16[M, K], du: bf16[M, K], wg: bf16[K, N], wu: bf16[K, N], dx: bf16[M, N]) {
    return dx + (dg @ wg + du @ wu): bf16
}""",
    "lora": """
program lora(x: bf16[M, K], w: bf16[N, K], h: bf16[M, R], b: bf16[N, R]) {
    return x @ w.T + h @ b.T: bf16
}""",
    "accumulate_f32": """
program accumulate_f32(dy: bf16[K, M], x: bf16[K, N], inout dw: f32[M, N]) {
    dw += dy.T @ x
}""",
    "accumulate_bf16": """
program accumulate_bf16(x: bf16[M, K], w: bf16[K, N], r: f32[M], inout y: bf16[M, N], inout db: f32[N]) {
    z = r * (x @ w)
    y += z
    db += sum(z, M)
}""",
    "accumulate_lanes": """
program accumulate_lanes(x: bf16[M, K], wg: bf16[N, K], wu: bf16[N, K], inout z: bf16[M, (s=2 N)]) {
    z += stack(x @ wg.T, x @ wu.T, s)
}""",
    "qkv_dgrad": """
program qkv_dgrad(dq: f16[M, K], dk: f16[M, R], dv: f16[M, R], wq: f16[K, N], wk: f16[R, N], wv: f16[R, N]) {
    return dq @ wq + dk @ wk + dv @ wv: f16
}""",
    "f16_lanes": """
program swiglu_f16(x: f16[M, K], wg: f16[N, K], wu: f16[N, K]) {
    return silu(x @ wg.T) * (x @ wu.T): f16
}""",
}
RAGGED = ((8, 8, 8), (8, 16, 64), (128, 128, 64), (136, 264, 72), (304, 136, 200), (264, 520, 1032), (2056, 384, 128))
LLAMA = ((8192, 4096, 4096), (4096, 14336, 8192), (8192, 4096, 14336))


@cache
def compiled(name: str, tile: str) -> coda.CompiledProgram:
    """The program at one tile; strict, so that a test cannot pass on a fallback. A variant that the build rejects for
    spills inside its k-loop is skipped, saying so."""
    call = coda.compile(PROGRAMS[name], tile=tile, fallback="strict")
    warm_or_skip(call)
    return call


def check(call: coda.CompiledProgram, m: int, n: int, k: int, seed: int, repeats: int = 0) -> None:
    """A call on random operands: right, complete, equal in bits when repeated, and its inputs unchanged."""
    sizes = {"M": m, "N": n, "K": k, "R": 8 + k // 16 * 8}
    inputs = random_inputs(call.program, {s: sizes[s] for s in symbols(call)}, seed, "cuda")
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    results = [run(call, inputs) for _ in range(1 + repeats)]
    for name, value in before.items():
        assert same_bits(value, inputs[name]), f"{name} was modified"  # run() accumulates into copies
    verdict = compare(call.program, before, results[0])
    assert verdict.ok, f"{call.program.name} {(m, n, k)}\n{verdict}"
    for again in results[1:]:
        assert all(same_bits(results[0][name], again[name]) for name in again)


def run(call: coda.CompiledProgram, inputs: dict) -> dict[str, torch.Tensor]:
    """All results by name: outputs in poisoned memory, inout parameters in copies."""
    out = poisoned_outputs(call.program, bind(call.program, shapes_of(inputs)), "cuda")
    accumulated = {o.into: inputs[o.into].clone() for o in call.program.outputs if o.into is not None}
    out = {name: value for name, value in out.items() if name not in accumulated}
    call(**{**inputs, **accumulated}, out=out)
    assert call.last_route.kind == "kernel"
    return {**out, **accumulated}


def symbols(call: coda.CompiledProgram) -> set[str]:
    return {axis.name for axis in call.program.free_axes}


def variants() -> list[tuple[str, str]]:
    """Every program at every tile that its operands allow."""
    plans = {name: lower(next(iter(coda.parse(text).programs.values()))) for name, text in PROGRAMS.items()}
    return [(name, tile.name) for name, plan in plans.items() for tile in TILES if legal_tile(tile, plan)]


@pytest.mark.parametrize(("name", "tile"), variants())
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, (m, n, k) in enumerate(RAGGED):
        check(call, m, n, k, seed)


@pytest.mark.parametrize("shape", LLAMA, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", PROGRAMS)
def test_llama_sizes_and_equal_bits_over_runs(name: str, shape: tuple[int, int, int]) -> None:
    check(compiled(name, "128x128"), *shape, seed=1, repeats=10)


def test_micro_batches_add_up_in_f32() -> None:
    """Gradients of many calls, each too small for bf16 to notice beside the sum, and equal bits in every run."""
    call = compiled("accumulate_f32", "128x128")
    generator = torch.Generator("cuda").manual_seed(3)
    batches = [
        [torch.randn(512, n, generator=generator, device="cuda").bfloat16() for n in (1024, 768)] for _ in range(32)
    ]
    runs = []
    for _ in range(2):
        dw = torch.full((1024, 768), 4096.0, device="cuda")
        for dy, x in batches:
            call(dy, x, dw)
            assert call.last_route.kind == "kernel"
        runs.append(dw)
    exact = 4096.0 + sum(dy.double().T @ x.double() for dy, x in batches)
    assert torch.equal(*runs)
    assert float((runs[0].double() - exact).abs().max()) < 32 * 2**-11  # one rounding of f32 at 4096 a call


def test_gradients_of_a_linear_layer_as_autograd_gives_them() -> None:
    """dx = dy @ w and dw += dy.T @ x from the tensors a training step has, none of them transposed or copied."""
    generator = torch.Generator("cuda").manual_seed(4)
    x, w, dy = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        for shape in ((2048, 1024), (3072, 1024), (2048, 3072))
    )
    dgrad = coda.compile("program dgrad(dy: bf16[M, N], w: bf16[N, K]) { return dy @ w: f32 }", fallback="strict")
    wgrad = compiled("accumulate_f32", "128x128")
    dx, dw = dgrad(dy, w), torch.zeros(3072, 1024, device="cuda")
    wgrad(dy, x, dw)
    a, b = x.double().requires_grad_(), w.double().requires_grad_()
    (a @ b.T).backward(dy.double())
    for got, want in ((dx, a.grad), (dw, b.grad)):
        assert float((got.double() - want).norm() / want.norm()) < 1e-5  # tensor cores truncate as they accumulate
