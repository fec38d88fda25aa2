"""Products with a batch: what they mean, their gradients, and the kernels they become. Their launches are tested in
tests/abi/test_batched.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import coda
from coda.errors import CodaError
from coda.frontend import load
from coda.ir import Program
from coda.passes import derive, optimize, partition
from coda.passes.prove import prove
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target import TILES, lower
from coda.target.blocks import lower_program
from coda.target.legality import select
from coda.target.plan import Major, Space
from coda.target.tiles import candidates, choose_tile, rank_tiles, variants
from tests.gradients import check_gradients, check_text

SIZES = {"B": 3, "M": 5, "N": 8, "K": 4, "F": 6, "D": 4}
PROGRAMS = {
    "plain": "x: bf16[B, M, K], w: bf16[B, K, N]) { return x @ w: bf16 }",
    "weight_rows": "x: bf16[B, M, K], w: bf16[B, N, K]) { return x @ w.T: bf16 }",
    "left_columns": "x: bf16[B, K, M], w: bf16[B, K, N]) { return x.T @ w: f32 }",
    "turned": "x: bf16[B, M, K], w: bf16[B, N, K]) { return (x @ w.T).T: bf16[B, N, M] }",
    "grouped": "x: bf16[(B H), M, K], w: bf16[(B H), N, K], b: bf16[H, N]) { return x @ w.T + b: bf16[(B H), M, N] }",
    "operands": """x: bf16[B, M, K], w: bf16[B, N, K], a: f32[B, N], b: f32[N]?, r: f32[B, M], t: f32[B],
                   y: f32[M, N]) {
        z = t * r * (x @ w.T + a) + b - y
        return gelu_tanh(z): bf16[M, B, N], sum(z * z, N): f32, mean(z, M): f32, total = sum(z, (B M N)): f32 }""",
    "gated": """x: bf16[B, M, K], v: bf16[B, F, K], w: bf16[B, F, K], d: bf16[B, D, F]) {
        return cast(silu(x @ v.T) * (x @ w.T), bf16) @ d.T: bf16 }""",
    "summed": """x: bf16[B, M, K], w: bf16[B, K, N], y: bf16[B, M, F], v: bf16[B, F, N]) {
        return x @ w + y @ v: bf16 }""",
    "normed": """h: bf16[B, M, K], g: bf16[K], w: bf16[B, N, K], eps: f32 = 1e-5) {
        return rms_norm(h, g, eps) @ w.T: bf16 }""",
}


def program(name: str) -> Program:
    return load(f"program {name}({PROGRAMS[name]}".replace("{ ", "{\n ").replace(" }", "\n}")).programs[name]


HEADS = """x: bf16[T, D], wq: bf16[(H d=64), D], wk: bf16[H, d, R], wv: bf16[H, R, d], wo: bf16[D, (H d)]) {
    q: bf16[H, T, d] = x @ wq.T
    latent = cast(q @ wk, bf16)
    v: bf16[T, (H d)] = latent @ wv
    return x + v @ wo.T: bf16"""


def heads() -> Program:
    return load(f"program heads({HEADS}\n}}\n").programs["heads"]


def test_heads_are_batches_without_copies() -> None:
    """The projection stores its heads apart, what is made of them is stored side by side."""
    steps = lower_program(heads(), sizes={"H": 4}).steps
    assert [s.kind for s in steps] == ["gemm"] * 4
    assert [bool(s.batch) for s in steps] == [False, True, True, False]
    check_gradients(heads(), {"T": 3, "D": 4, "H": 2, "R": 5})


@pytest.mark.parametrize(("stored", "at", "major"), [
    ("[M, B, K]", (1, 0), Major.K), ("[M, (B K)]", (1, 0), Major.K), ("[(B M), K]", (0, 0), Major.K),
    ("[K, B, M]", (1, 0), Major.MN), ("[B, K, M]", (0, 1), Major.MN), ("[(B K), M]", (0, 0), Major.MN),
])  # fmt: skip
def test_operands_are_read_where_they_lie(stored: str, at: tuple[int, int], major: Major) -> None:
    text = f"o: bf16{stored}, w: bf16[B, N, K]) {{\n x: bf16[B, M, K] = o\n return x @ w.T: bf16\n}}\n"
    plan = lower_program(load(f"program p({text}").programs["p"]).steps[0]
    assert (plan.kind, plan.terms[0].a_at, plan.a_major) == ("gemm", at, major)


def test_a_call_reads_what_it_declares() -> None:
    """Not a view, of which only products know."""
    text = """extern f(x: bf16[B, M, K]) -> y: bf16[B, M, K]
    program p(o: bf16[M, B, K], w: bf16[B, K, N]) {
        x: bf16[B, M, K] = o
        return f(x) @ w: bf16
    }"""
    kernels = partition(optimize(load(text).programs["p"])[0]).kernels
    assert [k.kind for k in kernels] == ["map", "call", "gemm"]


@pytest.mark.parametrize("stored", ["[M, K, B]", "[(M B), K]", "[(M K), B]"])
def test_other_operands_are_copied_first(stored: str) -> None:
    text = f"o: bf16{stored}, w: bf16[B, N, K]) {{\n x: bf16[B, M, K] = o\n return x @ w.T: bf16\n}}\n"
    assert [s.kind for s in lower_program(load(f"program p({text}").programs["p"]).steps] == ["map", "gemm"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str) -> None:
    sizes = SIZES | {"H": 2}
    check_text(program(name))
    symbols = {s.name for a in program(name).axes for s in a.size.free_symbols}
    for memory in ("fast", "low"):
        check_gradients(program(name), {n: s for n, s in sizes.items() if n in symbols}, memory=memory)


@pytest.mark.parametrize("changed", [{}, {"B": 0}, {"M": 0}, {"B": 1}], ids=str)
def test_what_torch_computes(changed: dict[str, int]) -> None:
    sizes = SIZES | changed
    for name, expected in {
        "plain": lambda x, w: x @ w,
        "weight_rows": lambda x, w: x @ w.mT,
        "left_columns": lambda x, w: x.mT @ w,
        "turned": lambda x, w: (x @ w.mT).mT,
        "gated": lambda x, v, w, d: (F.silu(x @ v.mT) * (x @ w.mT)) @ d.mT,
    }.items():
        p = program(name)
        symbols = {s.name for a in p.axes for s in a.size.free_symbols}
        inputs = random_inputs(p, {n: s for n, s in sizes.items() if n in symbols})
        (got,) = evaluate(p, inputs, exact=True).values()
        torch.testing.assert_close(got, expected(*(x.double() for x in inputs.values())), rtol=1e-9, atol=1e-9)


def test_several_dims_of_batches() -> None:
    """They are one, as several dims of rows are where there is no batch."""
    call = coda.compile(program("weight_rows"))
    x, w = torch.randn(2, 3, 5, 8, dtype=torch.bfloat16), torch.randn(2, 3, 16, 8, dtype=torch.bfloat16)
    y = call(x=x, w=w)
    assert y.shape == (2, 3, 5, 16)
    torch.testing.assert_close(y.double(), x.double() @ w.double().mT, rtol=2e-2, atol=2e-2)
    with pytest.raises(CodaError, match=r"operand 'w' has shape \[2, 16, 8\]"):
        call(x=x[0], w=w[0, :2])


@pytest.mark.parametrize("name", ["normed", "gated", "operands", "summed", "turned"])
def test_rewrites_change_no_value(name: str) -> None:
    before = program(name)
    after, notes = optimize(before)
    assert prove(before, after).holds, prove(before, after)
    if name == "normed":
        assert any(note.rule == "delay_norm" and note.label is not None for note in notes), "the norm moves behind"


def test_a_factor_of_each_batch_stays_where_it_is() -> None:
    """It is a number to its product, not a factor of rows: no other matrix is written to have it behind the product."""
    text = "x: bf16[B, M, K], w: bf16[B, N, K], t: f32[B], r: f32[B, M]) {\n return t * r * (x @ w.T): bf16\n}\n"
    gradients, notes = derive(load(f"program p({text}").programs["p"])
    assert not any(note.rule == "delay_norm" and note.label is not None for note in notes)
    operands = [n.args[0] for n in gradients.backward.nodes() if n.op == "dot"]
    assert len({x.args[0] if x.op == "transpose" else x for x in operands}) == 1, "both read one d_acc"


def test_operands_by_what_they_vary_over() -> None:
    plan = lower(program("operands"))
    spaces = {o.arg: (o.space, o.batch_dim, o.row_dim, o.column_dim) for o in plan.operands}
    assert spaces == {
        "a": (Space.COLUMN, 0, None, 1), "b": (Space.COLUMN, None, None, 0), "r": (Space.ROW, 0, 1, None),
        "t": (Space.UNIFORM, 0, None, None), "y": (Space.TILE, None, 0, 1),
    }  # fmt: skip
    out = plan.stores[0]
    assert (out.batch_dim, out.row_dim, out.column_dim) == (1, 0, 2)
    assert [f.kind for f in plan.finishings] == ["row", "column", "total"]


@pytest.mark.parametrize(("name", "majors"), [
    ("plain", (Major.K, Major.MN)), ("weight_rows", (Major.K, Major.K)), ("left_columns", (Major.MN, Major.MN)),
])  # fmt: skip
def test_operands_stored_either_way(name: str, majors: tuple[Major, Major]) -> None:
    plan = lower(program(name))
    assert (plan.a_major, plan.b_major) == majors
    assert [a.name for a in (*plan.batch, *plan.rows, *plan.columns)] == ["B", "M", "N"]


def test_a_block_and_its_backward_are_few_kernels() -> None:
    forward, backward = (p for p in (derive(program("gated"))[0].forward, derive(program("gated"))[0].backward))
    assert [s.kind for s in lower_program(forward).steps] == ["gemm", "gemm"]
    steps = lower_program(backward).steps
    assert all(s.kind == "gemm" and [a.name for a in s.batch] == ["B"] for s in steps)
    assert [len(s.terms) for s in steps].count(2) == 1, "the gradient of x is one sum of two products"


def test_the_tile_is_chosen_for_all_batches() -> None:
    plan = lower(program("weight_rows"))
    built = variants(plan, TILES)
    for batches, rows, columns in ((1, 256, 256), (33, 256, 256), (64, 1000, 520)):
        chosen = choose_tile(plan, {"B": batches, "M": rows, "N": columns})
        assert chosen.cluster_m == 2, "a multiple of two tiles, or so many that one more does not matter"

        def work(tile, batches=batches, rows=rows, columns=columns):
            tiles = batches * -(-rows // tile.m) * -(-columns // tile.n)
            return -(-tiles // 132) * tile.m * tile.n

        assert work(chosen) == min(work(t) for t in TILES if t.schedule == "pingpong" or work(t) < work(chosen))
        assert work(select(built, rows, columns, batches).tile) == min(work(t) for t in TILES)


@pytest.mark.parametrize(("rows", "cluster"), [(1, 1), (128, 1), (129, 2), (256, 2), (300, 1), (512, 2), (1400, 2)])
def test_few_rows_are_no_clusters_of_two(rows: int, cluster: int) -> None:
    """Which would compute twice the tiles of 128 rows, and four for three; what has no batch has always two."""
    plan = lower(program("weight_rows"))
    sizes = {"B": 64, "M": rows, "N": 512, "K": 256}
    tiles = {t.m: t.cluster_m for t in rank_tiles(plan, sizes)}
    assert tiles[128] == cluster
    assert {t.cluster_m for t in candidates(plan, sizes) if t.m == 128} == {cluster}
    plain = lower(load("program p(x: bf16[M, K], w: bf16[N, K]) {\n return x @ w.T: bf16\n}\n").programs["p"])
    assert {t.cluster_m for t in rank_tiles(plain, sizes)} == {2}


REFUSED = {
    "heads": (
        "x: bf16[B, M, K], w: bf16[B, (H d=64), K]) {\n z = x @ w.T\n return z * rsqrt(mean(z * z, d)): bf16",
        "a head-wise epilogue of a batched product is lowered in a later release",
    ),
    "partial": (
        "x: bf16[B, M, K], w: bf16[B, N, K]) {\n return partial(sum(x @ w.T, N)): f32",
        "unfinished reductions of a batched product are lowered in a later release",
    ),
    "batch_inside": (
        "x: bf16[B, M, K], w: bf16[B, N, K]) {\n return y = x @ w.T: bf16[(M B), N]",
        "'y' has dim (M B), which is not the batch (B), the rows (M) or the columns (N) of the product",
    ),
    "part_of_the_batch": (
        "x: bf16[(B H), M, K], w: bf16[(B H), N, K], b: bf16[H, N]) {\n return x @ w.T + b: bf16[(B H), M, N]",
        "'b' has dim (H), which is not the batch (B H), the rows (M) or the columns (N) of the product",
    ),
    "two_sums": (
        "x: bf16[B, M, K], w: bf16[B, N, K]) {\n z = x @ w.T\n return sum(z, M): f32, sum(z, (B M)): f32",
        "columns are added up over each batch and over all batches; one kernel does one",
    ),
    "total_of_each": (
        "x: bf16[B, M, K], w: bf16[B, N, K]) {\n return sum(x @ w.T, (M N)): f32",
        "a reduction over (M N) is lowered in a later release",
    ),
    "paired_between": (
        "x: bf16[B, M, K], v: bf16[N, B, K], w: bf16[N, B, K]) {\n p: bf16[B, N, K] = v\n q: bf16[B, N, K] = w\n"
        " return silu(x @ p.T) * (x @ q.T): bf16",
        "'v' is stored [N, B, K]; two products in one kernel take weights with the batch first",
    ),
    "by_columns": (
        "x: bf16[B, M, K], w: bf16[B, N, K], y: bf16[B, N, M]) {\n return x @ w.T + y: bf16[B, M, N]",
        "operand 'y' is stored by columns; this release prefetches rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(CodaError) as caught:
        lower(load(f"program p({text}\n}}\n").programs["p"])
    assert caught.value.diagnostics[0].message == message


@pytest.mark.parametrize("name", ["two_sums", "total_of_each", "heads", "part_of_the_batch"])
def test_what_one_kernel_refuses_several_compute(name: str) -> None:
    """The product alone, and kernels over rows behind it."""
    steps = lower_program(load(f"program p({REFUSED[name][0]}\n}}\n").programs["p"], sizes={"H": 2}).steps
    assert steps[0].kind == "gemm" and len(steps) > 1


def test_weight_gradients_of_one_activation_are_one_launch() -> None:
    text = "x: bf16[B, M, K], dg: bf16[B, M, N], du: bf16[B, M, N]) {\n return dg.T @ x: bf16, du.T @ x: bf16\n}\n"
    schedule = lower_program(load(f"program p({text}").programs["p"])
    assert schedule.members == (2, 0)
