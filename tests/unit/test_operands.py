"""Operands of products: dtypes, layouts, sums of products, accumulation into memory. What is lowered, what not."""

from __future__ import annotations

import pytest
import torch

from coda.errors import CodaError
from coda.target import TILES, lower
from coda.target.emit import device_source
from coda.target.legality import can_lower, legal_tile
from coda.target.plan import Major
from tests.support import program


def refusal(text: str) -> str:
    with pytest.raises(CodaError) as caught:
        lower(program(text))
    return caught.value.diagnostics[0].message


def test_f16_operands() -> None:
    plan = lower(program("program p(x: f16[M, K], w: f16[N, K]) { return x @ w.T: f16 }"))
    assert "using Element = cutlass::half_t;" in device_source(plan, [])


def test_f32_operands_are_refused() -> None:
    text = "program p(x: f32[M, K], w: f32[N, K]) { return x @ w.T: f32 }"
    assert "is f32" in refusal(text)


@pytest.mark.parametrize(
    ("x", "w", "product", "majors"),
    [
        ("[M, K]", "[N, K]", "x @ w.T", (Major.K, Major.K)),
        ("[M, K]", "[K, N]", "x @ w", (Major.K, Major.MN)),
        ("[K, M]", "[N, K]", "x.T @ w.T", (Major.MN, Major.K)),
        ("[K, M]", "[K, N]", "x.T @ w", (Major.MN, Major.MN)),
    ],
)
def test_operands_stored_either_way(x: str, w: str, product: str, majors: tuple[Major, Major]) -> None:
    plan = lower(program(f"program p(x: bf16{x}, w: bf16{w}) {{ return {product}: bf16 }}"))
    assert (plan.a_major, plan.b_major) == majors
    assert f"kMajorA = coda::Major::{majors[0].name}, kMajorB = coda::Major::{majors[1].name};" in device_source(
        plan, []
    )


DGRAD = "program p(dy: bf16[M, K], w: bf16[K, N]) { return dy @ w: bf16 }"


def test_every_tile_takes_a_weight_stored_either_way() -> None:
    assert all(legal_tile(tile, lower(program(DGRAD))) for tile in TILES)


def test_rows_along_the_stored_dim_are_aligned() -> None:
    """[K, N] has rows of N elements: 82 is no multiple of eight, whatever K is."""
    plan = lower(program(DGRAD))
    fits = [torch.zeros(16, 10, dtype=torch.bfloat16)[:, :8], torch.zeros(8, 88, dtype=torch.bfloat16)]
    out = torch.zeros(16, 88, dtype=torch.bfloat16)
    answer = can_lower(plan, [fits[0], fits[1], out], TILES[0])
    assert str(answer) == "operand 'dy' has rows 20 bytes apart; TMA needs a multiple of 16"
    dy, w = torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(8, 82, dtype=torch.bfloat16)
    answer = can_lower(plan, [dy, w, out[:, :82]], TILES[0])
    assert str(answer) == "operand 'w' has rows 164 bytes apart; TMA needs a multiple of 16"


def test_two_lanes_need_weights_whose_last_dim_is_contracted() -> None:
    text = "program p(x: bf16[M, K], g: bf16[K, F], u: bf16[K, F]) { return silu(x @ g) * (x @ u): bf16 }"
    assert refusal(text) == (
        "'g' is stored [K, F]; two products in one kernel take weights whose last dim is contracted"
    )


# -- sums of products -----------------------------------------------------------------------------------------------

SUM = """
program p(dg: bf16[M, F], du: bf16[M, G], wg: bf16[F, D], wu: bf16[G, D], x: bf16[M, D], b: bf16[D]) {
    return %s: bf16
}"""


@pytest.mark.parametrize("value", ["dg @ wg + du @ wu", "x * (dg @ wg + du @ wu) + b", "relu(du @ wu + dg @ wg)"])
def test_a_sum_is_one_product(value: str) -> None:
    plan = lower(program(SUM % value))
    assert {(t.a, *t.b, t.contraction[0].name) for t in plan.terms} == {("dg", "wg", "F"), ("du", "wu", "G")}
    assert [n.op for n in plan.products] == ["add"]


def test_what_stands_between_two_products_keeps_them_apart() -> None:
    between = "2 * (dg @ wg) + du @ wu"
    assert refusal(SUM % between) == (
        "the program has 2 products; one kernel takes one, two that share their left operand, or a sum of products"
    )


def test_a_product_read_elsewhere_is_not_part_of_a_sum() -> None:
    text = (SUM % "y + du @ wu").replace("return", "y = dg @ wg\n return y: bf16, z =")
    assert refusal(text).startswith("the program has 2 products")


def test_operands_of_a_sum_are_stored_alike() -> None:
    text = "program p(x: bf16[M, K], w: bf16[N, K], h: bf16[M, R], b: bf16[R, N]) { return x @ w.T + h @ b: bf16 }"
    assert refusal(text).startswith("'w' is stored [N, K] and 'b' [R, N], the contracted axis last in one only")
    text = "program p(x: bf16[M, K], w: bf16[N, K], h: f16[M, R], b: f16[N, R]) { return x @ w.T + h @ b.T: bf16 }"
    assert refusal(text) == "'x' is bf16 and 'h' is f16; products in one kernel have operands of one dtype"


def test_five_terms_are_too_many() -> None:
    parameters = ", ".join(f"x{i}: bf16[M, K{i}], w{i}: bf16[N, K{i}]" for i in range(5))
    text = f"program p({parameters}) {{ return {' + '.join(f'x{i} @ w{i}.T' for i in range(5))}: bf16 }}"
    assert refusal(text) == "a sum of 5 products; one kernel takes up to 4"


# -- accumulation into memory ---------------------------------------------------------------------------------------

WGRAD = "program p(dy: bf16[T, N], x: bf16[T, K], inout dw: %s[N, K]) { dw += dy.T @ x }"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_inout_parameter_is_an_operand_and_a_store_of_the_same_memory(dtype: str) -> None:
    plan = lower(program(WGRAD % dtype))
    assert [a.name for a in plan.args] == ["dy", "x", "dw"]
    assert [(o.arg, o.space.value, o.map) for o in plan.operands] == [("dw", "tile", 0)]
    assert [(s.kind, s.arg, s.dtype.name) for s in plan.stores] == [("tile", "dw", dtype)]


def test_lanes_accumulate_each_their_part() -> None:
    text = """program p(x: bf16[M, K], g: bf16[F, K], u: bf16[F, K], inout z: bf16[M, (s=2 F)]) {
        z += stack(x @ g.T, x @ u.T, s)
    }"""
    plan = lower(program(text))
    assert len(plan.stores[0].values) == 2
    assert "z_0" in device_source(plan, [])


def test_a_finished_reduction_accumulates() -> None:
    text = "program p(x: bf16[M, K], w: bf16[N, K], inout db: f32[N]) { db += sum(x @ w.T, M) }"
    (finishing,) = lower(program(text)).finishings
    assert [o.arg for o in finishing.operands] == ["db"]
    assert [name for _, name, _ in finishing.results] == ["db"]


def test_what_is_accumulated_into_shares_no_memory() -> None:
    plan = lower(program("program p(x: bf16[M, K], w: bf16[K, K2], inout y: bf16[M, K2]) { y += x @ w }"))
    x, w = torch.zeros(16, 8, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.bfloat16)
    assert str(can_lower(plan, [x, w, x], TILES[0])) == "operand 'y' shares memory with operand 'x'"
    rows = torch.zeros(1, 8, dtype=torch.bfloat16).expand(16, 8)
    assert str(can_lower(plan, [x, w, rows], TILES[0])) == (
        "operand 'y' has overlapping rows: 0 elements apart, 8 wide"
    )
