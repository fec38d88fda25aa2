"""Every example kernel at every tile: against float64, whole outputs, repeatedly, on ragged and on Llama sizes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

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

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("linear", "linear_bias_gelu", "residual_stats", "residual_stats_aux", "residual_rstd", "bias_gradient",
         "swiglu", "swiglu_preact", "swiglu_stats")  # fmt: skip
TILE_NAMES = tuple(t.name for t in TILES)
RAGGED = ((1, 8, 8), (7, 16, 64), (128, 128, 64), (129, 264, 72), (300, 136, 200), (257, 520, 1032), (2049, 384, 128))
LLAMA = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 28672, 4096), (8192, 6144, 4096))
_compiled: dict[tuple[str, str], coda.CompiledProgram] = {}


def compiled(name: str, tile: str) -> coda.CompiledProgram:
    """The example at one tile; strict, so that a test cannot pass on a fallback. A variant that the build itself
    rejects (it would spill inside the k-loop) is skipped, saying so."""
    if (name, tile) not in _compiled:
        call = coda.compile(EXAMPLES / f"{name}.coda", tile=tile, fallback="strict")
        warm_or_skip(call)
        _compiled[name, tile] = call
    return _compiled[name, tile]


def kernels(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each example with each tile that its operands fit."""
    plans = {name: lower(coda.parse(EXAMPLES / f"{name}.coda").programs[name]) for name in names}
    return [(name, tile.name) for name, plan in plans.items() for tile in TILES if legal_tile(tile, plan)]


def sizes_of(program, m: int, n: int, k: int) -> dict[str, int]:
    """M, N, K as the axes of the example's product; with two lanes N counts the accumulator columns of both."""
    dot = next(node for node in program.nodes() if node.op == "dot")
    (row,), (column,), (inner,) = dot.type.dims[0], dot.type.dims[1], dot.args[0].type.dims[1]
    lanes = sum(node.op == "dot" for node in program.nodes())
    return {row.name: m, column.size.name: max(8, n // lanes // 8 * 8), inner.name: k}


def run(call, inputs, m):
    """Outputs by name, written into poisoned memory, with the inputs proven unchanged."""
    before = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    sizes = bind(call.program, shapes_of(inputs))
    out = poisoned_outputs(call.program, sizes, "cuda")
    partial = [o.name for o in call.program.outputs if o.is_partial]
    for name in partial:  # their first dim is the artifact's
        shape = call.built().output_shapes(sizes)[name]
        out[name] = torch.full(shape, float("nan"), device="cuda")
    call(**inputs, out=out)
    assert call.last_route.kind == "kernel"
    for name, tensor in before.items():
        assert same_bits(tensor, inputs[name]), f"{name} was modified"
    return out


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, (m, n, k) in enumerate(RAGGED):
        inputs = random_inputs(call.program, sizes_of(call.program, m, n, k), seed, "cuda")
        out = run(call, inputs, m)
        result = compare(call.program, inputs, out)
        assert result.ok, f"{name} {tile} {(m, n, k)}\n{result}"


@pytest.mark.parametrize("shape", LLAMA, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", NAMES)
def test_llama_sizes_and_equal_bits_over_runs(name: str, shape: tuple[int, int, int]) -> None:
    call = compiled(name, "128x128")
    inputs = random_inputs(call.program, sizes_of(call.program, *shape), 1, "cuda")
    first = run(call, inputs, shape[0])
    result = compare(call.program, inputs, first)
    assert result.ok, str(result)
    for _ in range(50):
        again = run(call, inputs, shape[0])
        assert all(same_bits(first[o], again[o]) for o in first)


@pytest.mark.parametrize("tile", TILE_NAMES)
def test_a_program_finishes_the_partial_results_of_another(tile: str) -> None:
    """residual_stats_aux, at tiles of its own, and swiglu_stats behind it, against the norm in float64."""
    producer, consumer = compiled("residual_stats_aux", tile), compiled("swiglu_stats", "128x128")
    for m, d, f, k in ((1, 64, 8, 64), (129, 520, 72, 200), (300, 4096, 264, 128)):
        inputs = random_inputs(producer.program, {"M": m, "D": d, "A": k}, 2, "cuda")
        h, n, stats = producer(**inputs)
        assert stats.shape[1] == m and (stats.shape[0] > 1) == (d > 256)
        weights = {name: torch.randn(f, d, device="cuda", dtype=torch.bfloat16) / d**0.5 for name in ("w_gate", "w_up")}
        operands = {"n": n, "stats": stats, **weights}
        y, r = consumer(**operands)
        assert consumer.last_route.kind == "kernel"
        assert compare(consumer.program, operands, {"y": y, "r": r}).ok
        torch.testing.assert_close(r.double(), (h.double().square().mean(1) + 1e-5).rsqrt(), rtol=1e-6, atol=0)
        assert all(same_bits(x, again) for x, again in zip((y, r), consumer(**operands), strict=True))


FINAL_NORM = """
program final_norm(h: bf16[M, D], stats: partial[sum, D] f32[M], g: bf16[D], eps: f32 = 1e-5) {
    return n = h * rsqrt(finish(stats) / size(D) + eps) * g: bf16
}
"""


def test_a_kernel_over_rows_finishes_the_partial_results_of_a_product() -> None:
    producer, consumer = compiled("residual_stats", "128x128"), coda.compile(FINAL_NORM, fallback="strict")
    for m, d in ((1, 64), (129, 520), (300, 4104)):
        h, stats = producer(**random_inputs(producer.program, {"M": m, "D": d, "A": 128}, 3, "cuda"))
        operands = {"h": h, "stats": stats, "g": torch.randn(d, device="cuda", dtype=torch.bfloat16)}
        n = consumer(**operands)
        assert consumer.last_route.kind == "kernel", consumer.last_route
        assert compare(consumer.program, operands, {"n": n}).ok
        assert same_bits(n, consumer(**operands))
