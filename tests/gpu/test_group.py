"""Several products with one right operand as one launch: weight gradients of one activation."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import coda
from coda.frontend import load
from coda.passes import derive
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs

SOURCES = {
    "two": """program two(a: bf16[T, M], b: bf16[T, N], x: bf16[T, K], g: bf16[K]) {
        return g * (a.T @ x): bf16, db = g * (b.T @ x): bf16
    }""",
    "four": """program four(a: f16[T, M], b: f16[T, N], c: f16[T, P], d: f16[T, Q], x: f16[T, K]) {
        return a.T @ x: f16, b.T @ x: f16, c.T @ x: f16, d.T @ x: f16
    }""",
    "into": """program into(a: bf16[T, M], b: bf16[T, N], x: bf16[T, K], inout da: f32[M, K], inout db: f32[N, K]) {
        da += a.T @ x
        db += b.T @ x
    }""",
    "rows": """program rows(a: bf16[M, T], b: bf16[N, T], w: bf16[K, T], r: f32[M], s: f32[N]) {
        return r * (a @ w.T): bf16, y = s * (b @ w.T): bf16
    }""",
}
SIZES = [
    {"T": 72, "M": 8, "N": 264, "P": 136, "Q": 24, "K": 136},
    {"T": 1024, "M": 4096, "N": 1000, "P": 1024, "Q": 128, "K": 2048},
    {"T": 8192, "M": 2048, "N": 512, "P": 512, "Q": 2048, "K": 2048},
]


@lru_cache
def compiled(name: str) -> coda.CompiledProgram:
    f = coda.compile(SOURCES[name], fallback="strict")
    f.warmup("cuda")
    return f


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"T{s['T']}")
@pytest.mark.parametrize("name", SOURCES)
def test_group(name: str, sizes: dict[str, int]) -> None:
    f = compiled(name)
    known = {a.name for a in f.program.free_axes}
    chosen = {n: s for n, s in sizes.items() if n in known}
    inputs = random_inputs(f.program, chosen, 1, "cuda")
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    written = {p.name for p in f.program.params if p.inout}
    got = f(**inputs)
    assert f.last_route.kind == "kernel"
    assert all(torch.equal(x, inputs[n]) for n, x in before.items() if n not in written)
    results = got if isinstance(got, tuple) else () if got is None else (got,)
    outputs = dict(zip((o.name for o in f.program.outputs if o.into is None), results, strict=True))
    outputs |= {o.name: inputs[o.into] for o in f.program.outputs if o.into is not None}
    comparison = compare(f.program, before, outputs, dims=chosen)
    assert comparison.ok, comparison


def test_one_launch() -> None:
    f = compiled("four")
    inputs = random_inputs(f.program, SIZES[0], 1, "cuda")
    f(**inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        f(**inputs)
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if "four" in e.name]
    assert len(kernels) == 1, kernels


def test_the_backward_of_gate_and_up() -> None:
    """The derived backward of an MLP: its two weight gradients are one launch."""
    source = """program mlp(n: bf16[M, D], w_gate: bf16[F, D], w_up: bf16[F, D]) {
        return silu(n @ w_gate.T) * (n @ w_up.T): bf16
    }"""
    backward = derive(load(source).programs["mlp"])[0].backward
    f = coda.compile(backward, fallback="strict")
    sizes = {"M": 1000, "D": 520, "F": 1032}
    inputs = random_inputs(backward, sizes, 3, "cuda")
    got = dict(zip((o.name for o in backward.outputs), f(**inputs), strict=True))
    assert f.last_route.kind == "kernel"
    comparison = compare(backward, inputs, got, dims=sizes)
    assert comparison.ok, comparison
