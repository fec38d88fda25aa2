"""Row and map kernels on the device: every example at odd and at model sizes, every variant, any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import coda
from coda.frontend import load, load_path
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from tests.gpu.support import replays_with_new_data, run

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("rms_norm", "layer_norm", "softmax", "row_statistics", "gemma_post_norm", "drms_norm", "dlayer_norm", "drope",
         "dqk_norm")  # fmt: skip
ROWS = (1, 4, 7, 128, 4099)
# One thread to 512, one octet to four, whole octets and not; behind 16384 columns rows are read again.
WIDTHS = (1, 7, 8, 64, 100, 128, 520, 2048, 2056, 4096, 4104, 8192, 11008, 16384)
LONG = (16392, 32000, 128256)
SETS = """
program axis_kept(x: bf16[B, T, D]) {
    return s = sum(x, T): f32, m = mean(x, (T D)): bf16, z = 2 * x: f16
}
program bias_of_heads(x: bf16[B, H, T, d=128], c: f32[T, f=64], inout b: f32[(H d)]) {
    y = rope_half(x, c, c)
    b += sum(y, (B T))
    return y: f32, g = sum(y, (B T H)): bf16
}
program pairs(x: bf16[B, H, T, (f=64 p=2)], c: f32[T, f], z: f32[(B T), (H f p)]) {
    y = rope_interleaved(x, c, 0.5)
    return y: bf16[(B T), (H f p)], s = sum(y * z, (H f p)): f32
}
program dropout(x: bf16[(B T), D], seed: i64[], offset: i64[]) {
    return where(rand(seed, offset, [B, T, D]) >= 0.25, x / 0.75, 0): bf16
}
program head_sums(x: bf16[M, (H d=96)], g: f32[d]) {
    y = g * x * rsqrt(mean(x * x, d))
    return y: bf16, s = sum(y * y, (H d)) / size(M): f32, t = sum(y, (M H d)): f32
}
program two_sets(x: bf16[M, N], y: bf16[M, K]) {
    return z = 2 * x: f32, w = silu(y): bf16, r = mean(x, N) + max(y, K): f32
}
"""
HEADS = ((1, 1, 1), (2, 3, 5), (3, 8, 129), (4, 32, 2048))
_compiled: dict[str, coda.CompiledProgram] = {}


def compiled(name: str) -> coda.CompiledProgram:
    """Strict, so that a test cannot pass on a fallback."""
    if name not in _compiled:
        path = EXAMPLES / f"{name}.coda"
        program = next(iter(load_path(path).programs.values())) if path.exists() else load(SETS).programs[name]
        _compiled[name] = coda.compile(program, fallback="strict")
    return _compiled[name]


def check(name: str, sizes: dict[str, int], seed: int = 0) -> None:
    call = compiled(name)
    inputs = random_inputs(call.program, sizes, seed, "cuda")
    out = run(call, inputs, sizes)
    result = compare(call.program, inputs, out, dims=sizes)
    for o in result.outputs:
        # The error of a few roundings, or of one sum that may cancel, is a matter of luck, eager's too: those of bf16.
        few = out[o.name].numel() < 8 and o.misplaced == 0 and o.error < 2.0**-7
        assert o.ok or few, f"{name} {sizes}\n{result}"
    again = run(call, inputs, sizes)
    assert all(torch.equal(out[o], again[o]) for o in out), f"{name} {sizes}: two calls differ"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", [f for f in FILES if f not in ("drope", "dqk_norm", "dqkv")])
def test_rows_of_every_length(name: str, width: int) -> None:
    column = "V" if name == "softmax" else "D"
    for rows in ROWS:
        check(name, {"M": rows, column: width})


@pytest.mark.parametrize("width", LONG)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "row_statistics", "gemma_post_norm"])
def test_rows_that_are_read_again(name: str, width: int) -> None:
    column = "V" if name == "softmax" else "D"
    check(name, {"M": 300, column: width})


@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", ["drope", "dqk_norm", "dqkv"])
def test_heads_behind_attention(name: str, shape: tuple[int, int, int]) -> None:
    sizes = dict(zip("BHT", shape, strict=True)) | {"P": 4096}
    check(name, {a.name: sizes[a.name] for a in compiled(name).program.free_axes})


@pytest.mark.parametrize("rows", [1, 5, 64, 3000])
@pytest.mark.parametrize("name", ["axis_kept", "bias_of_heads", "dropout", "head_sums", "pairs", "two_sets"])
def test_sums_over_some_rows(name: str, rows: int) -> None:
    """Of parts of one launch, of blocks that keep to one step of a loop, of the heads of a row."""
    for width in (8, 100, 1024):
        sizes = {"B": 3, "T": rows, "H": 4, "M": rows, "D": width, "N": width, "K": 3 * width}
        check(name, {a.name: sizes[a.name] for a in compiled(name).program.free_axes})


def test_long_rows_with_sums_over_rows_are_refused() -> None:
    call = compiled("drms_norm")
    sizes = {"M": 4, "D": 16392}
    with pytest.raises(coda.CodaError, match="too large"):
        run(call, random_inputs(call.program, sizes, 0, "cuda"), sizes)


@pytest.mark.parametrize("name", ["rms_norm", "drms_norm", "gemma_post_norm"])
def test_any_layout_gives_the_values_of_the_contiguous_one(name: str) -> None:
    """Columns of a wider buffer, unaligned ones, rows in steps, transposed: no copy is made."""
    sizes = {"M": 200, "D": 512}
    call = compiled(name)
    inputs = random_inputs(call.program, sizes, 5, "cuda")
    want = run(call, inputs, sizes)
    layouts = {
        "columns": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        "unaligned": lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
        "rows": lambda x: torch.stack([x, x], 1)[:, 0],
        "transposed": lambda x: x.T.contiguous().T,
    }
    for how, change in layouts.items():
        moved = {k: change(x) if isinstance(x, torch.Tensor) and x.dim() == 2 else x for k, x in inputs.items()}
        got = run(call, moved, sizes)
        result = compare(call.program, moved, got, dims=sizes)
        assert result.ok, f"{name} {how}\n{result}"
        if how in ("columns", "rows"):  # the same variant: the same bits
            assert all(torch.equal(got[o], want[o]) for o in want), how


@pytest.mark.parametrize("name", FILES)
def test_graph_replays_with_new_data(name: str) -> None:
    sizes = {"B": 2, "H": 4, "T": 64, "P": 128} if name in ("drope", "dqk_norm") else {"M": 256, "D": 1024, "V": 1024}
    call = compiled(name)
    replays_with_new_data(call, {a.name: sizes[a.name] for a in call.program.free_axes})


def test_a_map_of_many_columns() -> None:
    text = "program scaled(x: f32[M, N], s: f32) { return y = s * x: bf16, z = silu(x): f16 }"
    call = coda.compile(text, fallback="strict")
    for m, n in ((1, 1 << 24), (3, 1_000_003), (5000, 9), (129, 4096)):
        x = torch.randn(m, n, device="cuda")
        y, z = call(x, 2.5)
        assert torch.equal(y, (2.5 * x).bfloat16())
        torch.testing.assert_close(z, torch.nn.functional.silu(x).half(), rtol=2e-3, atol=1e-3)


def test_equal_bits_over_runs_and_over_batches() -> None:
    """A row's values do not depend on the rows around it."""
    call = compiled("layer_norm")
    inputs = random_inputs(call.program, {"M": 1000, "D": 4096}, 3, "cuda")
    whole = run(call, inputs, {"M": 1000, "D": 4096})
    part = {k: x[300:317] if isinstance(x, torch.Tensor) and x.dim() == 2 else x for k, x in inputs.items()}
    some = run(call, part, {"M": 17, "D": 4096})
    assert torch.equal(whole["y"][300:317], some["y"])
    for _ in range(20):
        again = run(call, inputs, {"M": 1000, "D": 4096})
        assert all(torch.equal(again[o], whole[o]) for o in whole)
