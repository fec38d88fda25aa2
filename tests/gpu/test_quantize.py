"""8-bit outputs on the device: vector and scattered stores, saturation, amax, scales of blocks."""

from __future__ import annotations

import pytest
import torch

import coda
from coda.dtypes import F8E4M3, F8E5M2, S8
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from tests.gpu.test_examples import TILE_NAMES, compiled, run

RAGGED = ((1, 8, 8), (7, 16, 64), (129, 264, 72), (300, 1001, 200), (257, 520, 1032), (128, 13, 64))  # M, N, K
WHOLE = [t for t in TILE_NAMES if int(t.split("x")[1].removesuffix("_coop")) % 128 == 0]


@pytest.mark.parametrize("tile", TILE_NAMES)
@pytest.mark.parametrize("name", ["quantize_fp8", "quantize_int8"])
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, (m, n, k) in enumerate(RAGGED):
        inputs = random_inputs(call.program, {"M": m, "N": n, "K": k}, seed, "cuda")
        if name == "quantize_int8":
            inputs["scale"] = inputs["scale"].abs() / 16 + 0.01
        result = compare(call.program, inputs, run(call, inputs, m))
        assert result.ok, f"{name} {tile} {(m, n, k)}\n{result}"


@pytest.mark.parametrize("tile", WHOLE)
def test_blocks(tile: str) -> None:
    call = compiled("quantize_blocks", tile)
    for seed, (m, blocks, k) in enumerate(((1, 1, 8), (7, 2, 64), (300, 5, 200), (2049, 32, 256))):
        inputs = random_inputs(call.program, {"M": m, "nb": blocks, "K": k}, seed, "cuda")
        inputs["x"][m // 2], inputs["w"][:128] = 0, 0  # a row and a block of zeros
        out = run(call, inputs, m)
        result = compare(call.program, inputs, out)
        assert result.ok, f"{tile} {(m, blocks, k)}\n{result}"
        assert out["scale"][m // 2].eq(1).all()
        assert out["q"].float()[:, :128].abs().sum() == 0


@pytest.mark.parametrize("dtype", [F8E4M3, F8E5M2, S8], ids=str)
@pytest.mark.parametrize("flag", [", saturate", ""])
def test_every_value_rounds_as_the_interpreter(dtype, flag: str) -> None:
    """All 16-bit floats as a product with one: what the hardware converts is what the host emulation converts."""
    if dtype is S8 and not flag:
        pytest.skip("s8 is saturated")
    text = f"program p(x: bf16[M, K], w: bf16[N, K]) {{ return y = cast(x @ w.T, {dtype}{flag}) }}"
    call = coda.compile(text, tile="128x128", fallback="strict")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = torch.where(every.isfinite(), every, 1.0)  # inf * 0 elsewhere in the row would be NaN
    inputs = {"x": torch.zeros(2**16, 8).bfloat16().cuda(), "w": torch.zeros(16, 8).bfloat16().cuda()}
    inputs["x"][:, 0], inputs["w"][:, 0] = finite.cuda(), torch.linspace(0.5, 1.5, 16).cuda()
    got, want = run(call, inputs, 2**16)["y"].float(), evaluate(call.program, inputs)["y"].float()
    assert bool(((got == want) | (got.isnan() & want.isnan())).all())


def test_nan_and_infinity() -> None:
    text = "program p(x: bf16[M, K], w: bf16[N, K], c: f32[M]) { return y = cast(x @ w.T + c, f8e4m3, saturate) }"
    call = coda.compile(text, tile="128x128", fallback="strict")
    inputs = random_inputs(call.program, {"M": 3, "N": 32, "K": 64}, 0, "cuda")
    inputs["c"] = torch.tensor([float("inf"), float("-inf"), float("nan")]).cuda()
    y = run(call, inputs, 3)["y"].float()
    assert y[0].eq(448).all()
    assert y[1].eq(-448).all()
    assert y[2].isnan().all()
