"""Cases J1, J2, J3: 8-bit outputs. The formats to the last bit, and generated code against the interpreter."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import coda
from coda.dtypes import F8E4M3, F8E5M2, S8, TABLE, torch_dtype
from coda.errors import CodaError
from coda.runtime.reference import evaluate
from coda.target import lower
from tests.hostmath import compile_cpp, compile_plan
from tests.support import bf16, program

EXAMPLES = Path(__file__).parents[2] / "examples"
FORMATS = [F8E4M3, F8E5M2]
DRIVER = "\n".join(
    ['#include "quantize.h"']
    + [
        f'extern "C" void {name}_{how}(float const* x, uint8_t* y, int64_t count) {{\n'
        f"  for (int64_t i = 0; i < count; i += 2) {{\n"
        f"    uint32_t const w = coda::Storage<{cpp}>::{how}(x[i], x[i + 1]);\n"
        f"    y[i] = uint8_t(w), y[i + 1] = uint8_t(w >> 8);\n  }}\n}}"
        for name, cpp in (("f8e4m3", "coda::f8e4m3"), ("f8e5m2", "coda::f8e5m2"), ("s8", "int8_t"))
        for how in ("pack", "pack_saturated")
    ]
    + [
        f'extern "C" void {name}_load(uint8_t const* x, float* y, int64_t count) {{\n'
        f"  for (int64_t i = 0; i < count; ++i) y[i] = coda::load(reinterpret_cast<coda::{name} const*>(x + i));\n}}"
        for name in ("f8e4m3", "f8e5m2")
    ]
)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return compile_cpp(DRIVER)


def call(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    function = getattr(_library(), name)
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    function(x.data_ptr(), y.data_ptr(), x.numel())
    return y


@lru_cache(maxsize=1)
def floats() -> Tensor:
    """Every 16-bit float and its neighbours in f32: all ties, all limits, both zeros, infinities, NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = torch.cat([every.view(torch.float16).float(), every.view(torch.bfloat16).float()])
    return torch.cat(
        [values, *(torch.nextafter(values, torch.full_like(values, side)) for side in (-math.inf, math.inf))]
    )


def same(got: Tensor, want: Tensor) -> bool:
    got, want = got.float(), want.float()
    equal = (got == want) & (got.signbit() == want.signbit())
    return bool((equal | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_rounding_is_torchs(dtype):
    """Beyond its range f8e4m3 is NaN: it has no infinity, and whether torch saturates depends on its version."""
    x = floats()
    inside = torch.where(x.abs() > 464, math.nan, x) if dtype is F8E4M3 else x
    assert same(call(f"{dtype}_pack", x, torch_dtype(dtype)), inside.to(torch_dtype(dtype)))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_j2_saturation_keeps_nan(dtype):
    x = floats()
    most = torch.finfo(torch_dtype(dtype)).max
    got = call(f"{dtype}_pack_saturated", x, torch_dtype(dtype))
    assert same(got, x.clamp(-most, most).to(torch_dtype(dtype)))
    assert bool((got.float().isnan() == x.isnan()).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_code_is_read_as_torch_reads_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    assert same(call(f"{dtype}_load", codes, torch.float32), codes.view(torch_dtype(dtype)))


def test_int8_rounds_to_even_and_saturates():
    x = floats()
    got = call("s8_pack_saturated", x, torch.int8)
    assert torch.equal(got, torch.where(x.isnan(), 0.0, x.clamp(-128, 127).round()).to(torch.int8))


@pytest.mark.parametrize("dtype", [F8E4M3, F8E5M2, S8], ids=str)
@pytest.mark.parametrize("saturate", [True, False])
def test_generated_casts_are_the_interpreters(dtype, saturate):
    text = f"program p(x: bf16[M, K], w: bf16[N, K], s: f32[M]) {{ return cast(x @ w.T * s, {dtype}FLAG): {dtype} }}"
    p = program(text.replace("FLAG", ", saturate" if saturate else ""))
    if dtype is S8 and not saturate:
        with pytest.raises(CodaError, match="write cast\\(x, s8, saturate\\)"):
            lower(p)
        return
    inputs = {"x": bf16(6, 8), "w": bf16(10, 8), "s": torch.tensor([0.0, 1e-3, 1.0, 100.0, -1e5, math.inf])}
    assert same(compile_plan(lower(p))(inputs)["out"], evaluate(p, inputs)["out"])


@pytest.mark.parametrize("outer", ["(s F)", "(F s)"])
def test_lanes_of_an_8_bit_output(outer):
    p = program(
        "program p(x: bf16[M, K], a: bf16[F, K], b: bf16[F, K]) {"
        f" return cast(stack(x @ a.T, x @ b.T, s), f8e4m3, saturate): f8e4m3[M, {outer}] }}"
    )
    inputs = {"x": bf16(3, 8), "a": bf16(8, 8), "b": bf16(8, 8)}
    assert same(compile_plan(lower(p))(inputs)["out"], evaluate(p, inputs)["out"])


def test_j1_blocks_of_zeros_get_scale_one():
    p = coda.parse(EXAMPLES / "quantize_blocks.coda").programs["quantize_blocks"]
    x, w = bf16(4, 16), bf16(384, 16)
    x[1], w[128:256] = 0, 0
    out = evaluate(p, {"x": x, "w": w})
    y = (x.float() @ w.float().T).unflatten(1, (3, 128))
    amax = y.abs().amax(-1)
    assert torch.equal(out["scale"], torch.where(amax == 0, 1.0, amax / 448))
    q = out["q"].float().unflatten(1, (3, 128))
    assert q[1].abs().sum() == q[:, 1].abs().sum() == 0
    assert q.abs().amax(-1)[amax > 0].eq(448).all()  # the largest of a block is the largest there is
    torch.testing.assert_close(q * out["scale"][..., None], y, rtol=2**-4, atol=float(amax.max()) / 448 * 2**-9)


def test_j2_j3_static_scale_and_the_amax_of_the_call():
    """A value of 500 becomes 448; amax is that of the values there are, 13 columns of a tile of 128."""
    p = coda.parse(EXAMPLES / "quantize_fp8.coda").programs["quantize_fp8"]
    x, w = torch.full((5, 8), -1.0).bfloat16(), torch.full((13, 8), 62.5).bfloat16()
    x[3] = math.nan
    inputs = {"x": x[:3], "w": w, "scale": 1.0}
    out = compile_plan(lower(p))(inputs)
    assert out["q"].float().eq(-448).all()
    assert out["amax"] == 500
    out = compile_plan(lower(p))({"x": x, "w": w, "scale": 1.0})
    assert out["q"].float().isnan().any(1).tolist() == [False, False, False, True, False]
    assert out["amax"].isnan()


def test_every_8_bit_dtype_is_covered():
    assert {d for d in TABLE.values() if d.bits == 8 and d.kind != "bool"} == {F8E4M3, F8E5M2, S8}
