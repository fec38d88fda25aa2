"""Everything that lowering knows, on the GPU: operands, outputs, lanes and reductions of every kind; large tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import coda
from coda.ir import Program
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.target import TILES, lower
from coda.target.legality import legal_tile
from tests.gpu.support import warm_or_skip
from tests.support import same_bits

SPECIAL = Path(__file__).parents[1] / "programs" / "lowering" / "special.coda"
PROGRAMS = (
    "widths", "interleaved", "concatenated", "absent", "reductions", "transposed", "spaces", "casts", "low_rank",
    "weight_gradient", "log_sums", "finished",
)  # fmt: skip
SIZES = ((1, 16, 8), (4, 64, 64), (16, 136, 72), (129, 264, 200), (300, 384, 64))


@cache
def module() -> dict[str, Program]:
    return coda.parse(SPECIAL).programs


@cache
def compiled(name: str, tile: str) -> coda.CompiledProgram:
    program = module()[name]
    (chosen,) = (t for t in TILES if t.name == tile)
    if not legal_tile(chosen, lower(program)):
        pytest.skip(f"{tile} is not a tile for {name}")
    call = coda.compile(program, tile=tile, fallback="strict")
    warm_or_skip(call)
    return call


def run(call: coda.CompiledProgram, inputs: dict, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Outputs by name, from poisoned memory, by the kernel itself."""
    out = poisoned_outputs(call.program, sizes, "cuda")
    shapes = call.built().output_shapes(sizes)
    for output in call.program.outputs:
        if output.is_partial:
            out[output.name] = torch.full(shapes[output.name], float("nan"), device="cuda")
    call(**inputs, out=out)
    assert call.last_route.kind == "kernel", call.last_route
    return out


def axis_sizes(m: int, n: int, k: int) -> dict[str, int]:
    return {"M": m, "N": n, "F": n, "K": k, "R": 8 * (1 + k // 16), "T": 8 * (1 + m // 8)}


@pytest.mark.parametrize("tile", [t.name for t in TILES])
@pytest.mark.parametrize("name", PROGRAMS)
def test_kind(name: str, tile: str) -> None:
    """Case B5, too: operands of every kind at one, four and sixteen rows."""
    call = compiled(name, tile)
    for seed, (m, n, k) in enumerate(SIZES):
        sizes = axis_sizes(m, n, k)
        if name == "weight_gradient":
            sizes["K"] = n
        for optional in (True, False):
            inputs = random_inputs(call.program, sizes, seed, "cuda", optional=optional)
            out = run(call, inputs, sizes)
            result = compare(call.program, inputs, out)
            assert result.ok, f"{name} {tile} {sizes} optional={optional}\n{result}"
            again = run(call, inputs, sizes)
            assert all(same_bits(out[o], again[o]) for o in out)


def test_scalars_in_device_memory_are_those_from_the_host() -> None:
    call = compiled("absent", "128x128")
    inputs = random_inputs(call.program, axis_sizes(64, 64, 64), 0, "cuda") | {"alpha": 1.5, "beta": -0.25}
    host = call(**inputs)
    device = call(**inputs | {"alpha": torch.tensor(1.5, device="cuda"), "beta": torch.tensor(-0.25, device="cuda")})
    assert torch.equal(host, device)


def test_c11_a_scale_per_tensor_or_per_row_takes_one_kernel() -> None:
    call = compiled("absent", "128x128")
    inputs = random_inputs(call.program, axis_sizes(64, 64, 64), 0, "cuda") | {"beta": 1.0}
    one = torch.full((1,), 0.5, device="cuda")
    assert torch.equal(call(**inputs | {"r": one}), call(**inputs | {"r": one.expand(64).contiguous()}))


def test_a3_vectors_at_any_alignment() -> None:
    call = compiled("absent", "128x128")
    inputs = random_inputs(call.program, axis_sizes(64, 64, 64), 0, "cuda") | {"beta": 1.0}
    want = call(**inputs)
    buffer = torch.empty(65, device="cuda", dtype=torch.bfloat16)
    buffer[1:] = inputs["bias"]
    assert torch.equal(call(**inputs | {"bias": buffer[1:]}), want)
    assert call.last_route.kind == "kernel"


@pytest.mark.parametrize("columns", [82, 257])
def test_outputs_whose_rows_are_not_aligned(columns: int) -> None:
    call = compiled("spaces", "128x128")
    sizes = axis_sizes(130, columns, 64)
    inputs = random_inputs(call.program, sizes, 0, "cuda")
    result = compare(call.program, inputs, run(call, inputs, sizes))
    assert result.ok, str(result)


def test_b9_more_than_two_to_the_31_elements() -> None:
    rows, columns = 65536, 50264  # 3.3e9 elements, 6.6 GB
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, 64, device="cuda", dtype=torch.bfloat16) / 8
    y = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    coda.compile("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }", fallback="strict")(x, w, out=y)
    for first in (0, 42000, 42731, rows - 128):
        part = y[first : first + 128]
        want = x[first : first + 128].double() @ w.double().T
        assert not part.isnan().any()
        assert (part.double() - want).norm() / want.norm() < 4e-3
    assert not any(y[i : i + 8192].isnan().any() for i in range(0, rows, 8192))
