"""Batched products on the device: each form and epilogue, on ragged sizes and batches, against float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import coda
from coda.ir import Program
from coda.passes import derive
from coda.runtime.binding import bind, shapes_of
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.target import TILES, lower
from coda.target.legality import legal_tile
from tests.gpu.support import warm_or_skip
from tests.support import same_bits

# Each over B, M, N, K; one kernel is built for each program and tile.
PROGRAMS = {
    "weight_rows": "x: bf16[B, M, K], w: bf16[B, N, K]) {\n return x @ w.T: bf16",
    "weight_columns": "x: bf16[B, M, K], w: bf16[B, K, N]) {\n return x @ w: f32[M, B, N]",
    "both_columns": "dy: bf16[B, K, M], x: bf16[B, K, N]) {\n return dy.T @ x: f32",
    "everything": """x: bf16[B, M, K], w: bf16[B, N, K], bias: bf16[N]?, shift: f32[B, N], r: f32[B, M], t: f32[B],
                     res: bf16[B, M, N]) {
        y = cast(t * r * (x @ w.T) + bias + shift + res, bf16)
        return y, sum(y * y, N): f32, sum(y, M): f32""",
    "over_all": """x: f16[B, M, K], w: f16[B, K, N], shared: f16[M, N], label: i64[B, M]) {
        y = x @ w + shared
        return sum(y, (B M)): f32, total = mean(y, (B M N)): f32, loss = logsumexp(y, N) - pick(y, N, label): f32""",
    "gated": """x: bf16[B, M, K], v: bf16[B, N, K], w: bf16[B, N, K], b: bf16[B, N]) {
        z = stack(x @ v.T + b, x @ w.T, s)
        return silu(z.s[0]) * z.s[1]: bf16, z: bf16[B, M, (s N)]""",
    "halves": """x: bf16[B, M, K], w: bf16[B, (s=2 N), K], z0: bf16[B, M, (s N)]) {
        z = x @ w.T + z0
        return silu(z.s[0]) * z.s[1]: bf16""",
    "summed": """dg: bf16[B, M, K], du: bf16[B, M, K], v: bf16[B, K, N], w: bf16[B, K, N]) {
        return dg @ v + du @ w: bf16""",
    "accumulated": "dy: bf16[B, K, M], x: bf16[B, K, N], inout dw: f32[B, M, N]) {\n dw += dy.T @ x",
    "shared_dims": """x: bf16[B, M, K], w: bf16[B, N, K], bias: bf16[(B N)], r: f32[(B M)], res: bf16[(B M), N],
                      wide: bf16[M, (B N)]) {
        y = r * (x @ w.T) + bias + res + wide
        return y: bf16[M, (B N)], sum(y, N): f32[(B M)], sum(y, M): f32[(B N)]""",
    "between": """o: bf16[M, B, K], u: bf16[N, (B K)]) {
        x: bf16[B, M, K] = o
        t: bf16[B, N, K] = u
        return x @ t.T: bf16[M, (B N)]""",
    "columns_between": """o: bf16[K, (B M)], w: bf16[(B K), N]) {
        x: bf16[B, K, M] = o
        z: bf16[B, K, N] = w
        return x.T @ z: bf16[B, M, N]""",
    "dropped": """x: bf16[B, M, K], w: bf16[B, N, K], seed: i64, offset: i64) {
        return where(rand(seed, offset, [B, M, N]) >= 0.25, x @ w.T, 0): bf16""",
}
ALONE = "128x128_c1"  # in no cluster of two: what batches of few rows get
EVERY_TILE = ("weight_rows", "weight_columns", "both_columns", "everything", "gated", "halves")
MLP = """x: bf16[B, M, K], v: bf16[B, N, K], w: bf16[B, N, K], d: bf16[B, K2, N], r: bf16[B, M, K2]) {
    return r + cast(silu(x @ v.T) * (x @ w.T), bf16) @ d.T: bf16"""
# B, M, N, K: one batch and many, rows less than a tile and more, no size round but where TMA wants it.
RAGGED = ((1, 8, 8, 8), (3, 40, 64, 72), (5, 136, 136, 64), (2, 304, 264, 200), (17, 128, 520, 128), (99, 24, 40, 1032))
LARGE = (8, 1024, 4096, 4096)


def program(name: str) -> Program:
    return next(iter(coda.parse(f"program {name}({PROGRAMS[name]}\n}}\n").programs.values()))


@cache
def compiled(name: str, tile: str) -> coda.CompiledProgram:
    """The program at one tile; strict, so that a test cannot pass on a fallback. A variant that the build rejects for
    spills inside its k-loop is skipped, saying so."""
    call = coda.compile(program(name), tile=tile, fallback="strict")
    warm_or_skip(call)
    return call


def run(call: coda.CompiledProgram, inputs: dict) -> dict[str, torch.Tensor]:
    """All results by name: outputs in poisoned memory, inout parameters in copies; the inputs are proven unchanged."""
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    out = poisoned_outputs(call.program, bind(call.program, shapes_of(inputs)), "cuda")
    accumulated = {o.into: inputs[o.into].clone() for o in call.program.outputs if o.into is not None}
    out = {name: value for name, value in out.items() if name not in accumulated}
    call(**{**inputs, **accumulated}, out=out)
    assert call.last_route is not None and call.last_route.kind == "kernel"
    assert all(same_bits(value, inputs[name]) for name, value in before.items()), "an input was modified"
    return {**out, **accumulated}


def operands(p: Program, sizes: tuple[int, int, int, int], seed: int) -> dict:
    by_name = dict(zip("BMNK", sizes, strict=True)) | {"K2": sizes[3]}
    return random_inputs(p, {a.name: by_name[a.name] for a in p.free_axes}, seed, "cuda")


def check(call: coda.CompiledProgram, inputs: dict, what: object) -> None:
    first = run(call, inputs)
    verdict = compare(call.program, inputs, first)
    assert verdict.ok, f"{call.program.name} {what}\n{verdict}"
    again = run(call, inputs)
    assert all(same_bits(first[name], again[name]) for name in first), f"{what}: two calls differ"


def kernels() -> list[tuple[str, str]]:
    plans = {name: lower(program(name)) for name in PROGRAMS}
    found = [
        (name, tile.name)
        for name, plan in plans.items()
        for tile in (TILES if name in EVERY_TILE else TILES[:1])
        if legal_tile(tile, plan)
    ]
    return found + [(name, ALONE) for name in EVERY_TILE]


@pytest.mark.parametrize(("name", "tile"), kernels())
def test_ragged_sizes(name: str, tile: str) -> None:
    call = compiled(name, tile)
    for seed, sizes in enumerate(RAGGED):
        check(call, operands(call.program, sizes, seed), sizes)


@pytest.mark.parametrize("rows", [1, 37, 129])
@pytest.mark.parametrize("name", ["everything", "gated", "weight_columns"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    call = compiled(name, ALONE)
    check(call, operands(call.program, (7, rows, 72, 64), rows), rows)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "dropped"])
def test_large(name: str) -> None:
    call = compiled(name, "128x128")
    check(call, operands(call.program, LARGE, 1), LARGE)


@pytest.mark.parametrize("name", ["everything", "gated", "weight_columns"])
def test_batches_that_lie_between_rows(name: str) -> None:
    """[M, B, ..] in memory, as heads of a sequence do."""
    call = compiled(name, "128x128")
    inputs = operands(call.program, (5, 136, 64, 72), 3)
    between = {k: v.transpose(0, 1).contiguous().transpose(0, 1) if v.dim() == 3 else v for k, v in inputs.items()}
    want, got = run(call, inputs), run(call, between)
    assert all(same_bits(want[name], got[name]) for name in want)


@pytest.mark.parametrize("name", ["everything", "over_all", "gated"])
def test_each_batch_is_a_product_of_its_own(name: str) -> None:
    """Batch b of a call has the bits of a call with batch b alone."""
    call = compiled(name, "128x128")
    inputs = operands(call.program, (4, 136, 264, 200), 5)
    of_batch = {p.name for p in call.program.params if p.type.dims and p.type.dims[0][0].name == "B"}
    whole = run(call, inputs)
    for b in range(4):
        alone = run(call, {k: v[b : b + 1].contiguous() if k in of_batch else v for k, v in inputs.items()})
        for output in call.program.outputs:
            if output.type.dims and output.type.dims[0][0].name == "B":
                assert same_bits(whole[output.name][b : b + 1], alone[output.name]), (output.name, b)


@pytest.mark.parametrize("empty", [{"B": 0}, {"M": 0}], ids=str)
def test_empty(empty: dict[str, int]) -> None:
    sizes = {"B": 3, "M": 40, "N": 64, "K": 72} | empty
    call = compiled("everything", "128x128")
    out = run(call, operands(call.program, (sizes["B"], sizes["M"], 64, 72), 0))
    sums = [o for o in call.program.outputs if o.type.names == {"B", "N"}]
    assert len(sums) == 1 and (out[sums[0].name] == 0).all()


@pytest.mark.parametrize("sizes", [(3, 136, 264, 72), (8, 1024, 2048, 1024)], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_block_and_its_derived_backward(backward: bool, sizes: tuple[int, int, int, int]) -> None:
    p = next(iter(coda.parse(f"program mlp({MLP}\n}}\n").programs.values()))
    p = derive(p)[0].backward if backward else p
    call = _block(p)
    check(call, operands(call.program, sizes, 1), sizes)


@pytest.mark.parametrize("sizes", [(3, 136, 264, 72), (8, 1024, 2048, 1024)], ids=str)
def test_weight_gradients_are_one_launch(sizes: tuple[int, int, int, int]) -> None:
    """Of several batches each, and of several rows."""
    text = "x: bf16[B, M, K], dg: bf16[B, M, N], du: bf16[B, M, K2]) {\n return dg.T @ x: f32, du.T @ x: f32\n}\n"
    call = _block(next(iter(coda.parse(f"program gradients({text}").programs.values())))
    check(call, operands(call.program, sizes, 2), sizes)


@cache
def _block(p: Program) -> coda.CompiledProgram:
    return coda.compile(p, fallback="strict")


def test_against_bmm() -> None:
    """The plain product has the values of torch.bmm."""
    call = compiled("weight_rows", "128x128")
    x, w = (torch.randn(6, n, 256, device="cuda", dtype=torch.bfloat16) for n in (200, 328))
    y = call(x=x, w=w)
    torch.testing.assert_close(y, torch.bmm(x, w.mT), rtol=2e-2, atol=2e-2)
