"""The unfused way: eager PyTorch's roundings, products by torch.matmul, and no operand ever written or kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

import coda
from coda.passes.eager import round_as_eager
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs, small_sizes
from coda.runtime.reference import run_nodes
from coda.runtime.unfused import Native, Unfused, traced
from tests.support import RESIDUAL_STATS, program, same

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.coda"))
GELU = "program p(x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?) { return gelu_tanh(x @ w.T + bias): bf16 }"


def operands(text: str, seed: int = 0, **dims: int):
    p = program(text)
    sizes = small_sizes(p, dims)
    return p, sizes, random_inputs(p, sizes, seed)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_passes_the_gate(path: Path) -> None:
    for p in coda.parse(path).programs.values():
        if any(n.op == "call" for n in p.nodes()):
            continue  # its function takes the sizes of a model only
        sizes = small_sizes(p)
        inputs = random_inputs(p, sizes, 1)
        before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        got = Unfused(p)(inputs, sizes)
        result = compare(p, inputs, got, dims=sizes)
        assert result.ok, f"{p.name}\n{result}"
        assert all(x.is_contiguous() for x in got.values())
        assert all(same(x, inputs[n]) for n, x in before.items())


def test_products_are_of_the_operands_as_they_lie() -> None:
    """No copy in f32 of what is multiplied: that would not be what eager PyTorch does."""
    seen: list[tuple[torch.dtype, bool]] = []

    class Spy(Native):
        def contract(self, a, b, node):
            seen.extend((x.dtype, x.data_ptr() in addresses) for x in (a, b))
            return super().contract(a, b, node)

    p, sizes, inputs = operands(RESIDUAL_STATS)
    addresses = {x.data_ptr() for x in inputs.values()}
    eager = round_as_eager(p)
    run_nodes(eager, Spy(eager, inputs, sizes, torch.float32, False, torch.device("cpu")))
    assert seen == [(torch.bfloat16, True)] * 2


def test_results_share_no_memory() -> None:
    text = "program p(x: bf16[M, K], w: bf16[N, K]) {\n y = x @ w.T\n return same = x: bf16, y: bf16, z = y: bf16\n}"
    p, sizes, inputs = operands(text)
    got = Unfused(p)(inputs, sizes)
    addresses = [x.data_ptr() for x in (*got.values(), *inputs.values())]
    assert len(set(addresses)) == len(addresses)
    assert torch.equal(got["same"], inputs["x"])


def test_nothing_is_kept() -> None:
    p, sizes, inputs = operands(GELU)
    unfused = Unfused(p)
    kept = weakref.ref(unfused(inputs, sizes)["out"]), weakref.ref(inputs["x"])
    inputs.clear()
    gc.collect()
    assert [k() for k in kept] == [None, None]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_is_a_graph_for_inductor(path: Path) -> None:
    """Nothing in it looks at values; what draws random numbers from a seed is never traced."""
    for p in coda.parse(path).programs.values():
        if any(n.op == "call" for n in p.nodes()) or not (unfused := Unfused(p))._may_compile():
            continue
        sizes = small_sizes(p)
        inputs = random_inputs(p, sizes, 1)
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        function = unfused._eager(list(tensors), {n: x for n, x in inputs.items() if n not in tensors}, sizes)
        graph = traced(function, list(tensors.values()))
        assert len(graph(*tensors.values())) == len(p.outputs)
        products = [n for n in graph.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)]
        assert len(products) == sum(n.op == "dot" for n in p.nodes())


@pytest.mark.slow
def test_inductor_computes_the_same_and_is_kept_for_a_layout() -> None:
    p, sizes, inputs = operands(GELU)
    compiled, eager = Unfused(p, use_inductor=True), Unfused(p)
    for seed in (0, 1):
        inputs = random_inputs(p, sizes, seed)
        a, b = compiled(inputs, sizes)["out"].double(), eager(inputs, sizes)["out"].double()
        assert (a - b).norm() / b.norm() < 4e-3
    assert len(compiled._compiled) == 1
    assert (compiled.how, eager.how) == ("torch.compile", "eager torch")
    compiled(inputs | {"bias": None}, sizes)
    assert len(compiled._compiled) == 2


def test_where_inductor_fails_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("no triton")

    monkeypatch.setattr("coda.runtime.unfused._compiled", no_compiler)
    p, sizes, inputs = operands(GELU)
    unfused = Unfused(p, use_inductor=True)
    assert torch.equal(unfused(inputs, sizes)["out"], Unfused(p)(inputs, sizes)["out"])
    assert unfused.how == "eager torch"


def test_a_position_outside_a_table_shows_as_nan() -> None:
    p, _, _ = operands("program p(x: bf16[M, N], table: f32[P, N], at: i32[M]) { return x + table[at]: f32 }")
    sizes = {"M": 3, "N": 4, "P": 5}
    inputs = random_inputs(p, sizes) | {"at": torch.tensor([4, 5, -1], dtype=torch.int32)}
    (out,) = Unfused(p)(inputs, sizes).values()
    assert out.isnan().any(1).tolist() == [False, True, True]
    assert torch.equal(out[0], inputs["x"][0] + inputs["table"][4])


def test_seeds_are_no_constants() -> None:
    text = "program p(x: bf16[M, N], seed: i64) { return where(rand(seed, 0, [M, N]) < 0.5, x, 0): bf16 }"
    p, sizes, inputs = operands(text)
    unfused = Unfused(p, use_inductor=True)
    assert not torch.equal(*(unfused(inputs | {"seed": s}, sizes)["out"] for s in (1, 2)))
    assert unfused.how == "eager torch"
