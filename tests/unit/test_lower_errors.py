"""Every sentence with which lowering refuses a program: at which line and column, and what to do instead."""

from __future__ import annotations

import weakref

import pytest

from coda.errors import CodaError
from coda.frontend import load
from coda.target import lower

# Each program without its header "program p(" and the final "}"; place, message, hint.
REFUSALS = {
    "no_product": (
        "x: bf16[M, N]) {\n return x + 1: bf16",
        None, "the program has no product '@', so there is no GEMM to fuse into", None,
    ),
    "block_program": (
        "x: bf16[M, K], w: bf16[N, K], v: bf16[K, N]) {\n y = cast(x @ w.T, bf16)\n return y @ v.T: bf16",
        (3, 9), "one product feeds another: this is a block program, which is lowered in a later release", None,
    ),
    "two_left_operands": (
        "x: bf16[M, K], z: bf16[M, K], w: bf16[N, K], v: bf16[N, K]) {\n return (x @ w.T) * (z @ v.T): bf16",
        (2, 22),
        "the program has 2 products; one kernel takes one, two that share their left operand, or a sum of products",
        "put the others into programs of their own; a sum stands together, as in c + (x @ v.T + y @ w.T)",
    ),
    "three_products": (
        "x: bf16[M, K], w: bf16[N, K], v: bf16[N, K], u: bf16[N, K]) {\n return x @ w.T * (x @ v.T) * (x @ u.T): bf16",
        (2, 32),
        "the program has 3 products; one kernel takes one, two that share their left operand, or a sum of products",
        "put the others into programs of their own; a sum stands together, as in c + (x @ v.T + y @ w.T)",
    ),
    "two_result_axes": (
        "x: bf16[M, K], w: bf16[N, K], v: bf16[F, K]) {\n return a = x @ w.T: bf16, b = x @ v.T: bf16",
        (2, 32), "two products in one kernel need the same result axes; these have [M, N] and [M, F]", None,
    ),
    # operands of the product
    "terms_stored_unlike": (
        "x: bf16[M, K], w: bf16[N, K], z: bf16[M, J], v: bf16[J, N]) {\n return x @ w.T + z @ v: bf16",
        (1, 56), "'w' is stored [N, K] and 'v' [J, N], the contracted axis last in one only; products in one kernel "
        "have operands stored alike",
        "store 'v' transposed",
    ),
    "terms_of_two_dtypes": (
        "x: bf16[M, K], w: bf16[N, K], z: f16[M, J], v: f16[N, J]) {\n return x @ w.T + z @ v.T: bf16",
        (1, 41), "'x' is bf16 and 'z' is f16; products in one kernel have operands of one dtype", None,
    ),
    "lanes_not_transposed": (
        "x: bf16[M, D], v: bf16[D, N], w: bf16[D, N]) {\n return silu(x @ v) * (x @ w): bf16",
        (1, 26), "'v' is stored [D, N]; two products in one kernel take weights whose last dim is contracted",
        "store it as [N, D] and write v.T",
    ),
    "right_computed": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return x @ cast(w * 2, bf16).T: bf16",
        (2, 13), "the right operand of '@' is computed ('cast'); a kernel reads it from memory",
        "compute it in the program before, or pass it as a parameter",
    ),
    "left_computed": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return cast(x * 2, bf16) @ w.T: bf16",
        (2, 9), "the left operand of '@' is computed ('cast'); a kernel reads it from memory",
        "compute it in the program before, or pass it as a parameter",
    ),
    "f32_product": (
        "x: f32[M, K], w: f32[N, K]) {\n return x @ w.T: bf16",
        (1, 11), "the left operand 'x' of '@' is f32", "bf16 and f16 are the operand dtypes of this release",
    ),
    # lanes
    "three_lanes": (
        "x: bf16[M, K], w: bf16[(s=3 F), K]) {\n z = x @ w.T\n return z.s[0] * z.s[1] + z.s[2]: bf16",
        (2, 6), "the columns of a product are split in lanes of 'F', which has no number as its size",
        "three lanes and more take a multiple of 16 columns: declare F=768, or give --dims F=768",
    ),
    "half_is_wasted": (
        "x: bf16[M, K], w: bf16[(s=2 F), K]) {\n z = x @ w.T\n return z.s[0]: bf16",
        (2, 6), "lane 1 of axis 's' is never used, half of the product is wasted",
        "pass the half of the weight that is used",
    ),
    "lanes_in_the_middle": (
        "x: bf16[M, K], w: bf16[(E s=2 F), K]) {\n z = x @ w.T\n return z.s[0] * z.s[1]: bf16",
        (2, 6), "axis 's' must be first or last in its group (E s F)",
        "first keeps the lanes apart, last interleaves them",
    ),
    "lanes_of_lanes": (
        "x: bf16[M, K], w: bf16[(s=2 F t=2), K]) {\n z = x @ w.T\n return z.s[0].t[0] * z.s[1].t[1]: bf16",
        (3, 9), "'slice' over the lane axis 't' is lowered in a later release", None,
    ),
    "lanes_along_the_contraction": (
        "x: bf16[M, K], w: bf16[K, (s=2 F)]) {\n z = x @ w\n return z.s[0] * z.s[1]: bf16",
        (1, 26), "'w' is stored [K, (s F)]; two products in one kernel take weights whose last dim is contracted",
        "store it as [(s F), K] and write w.T",
    ),
    "unknown_size": (
        "x: bf16[M, K], w: bf16[(S F), K]) {\n z = x @ w.T\n return z.S[0] * z.S[1]: bf16",
        (3, 9), "axis 'S' is sliced, so its size must be known", "give it where the axis is declared, as in (S=2 F)",
    ),
    "logsumexp_over_lanes": (
        "x: bf16[M, K], w: bf16[(s=2 F), K]) {\n z = x @ w.T\n return z.s[0] * z.s[1]: bf16, m = logsumexp(z, s): bf16",
        (3, 36), "'logsumexp' over the lane axis 's' is lowered in a later release",
        "write it over the lanes, as in z.s[0] + z.s[1]",
    ),
    # where values vary
    "stranger": (
        "x: bf16[M, K], w: bf16[N, K], e: bf16[E]) {\n return sum((x @ w.T) * e, E): bf16",
        (2, 13), "a value over axes [M, N, E] does not fit the output tile [M, N]: it has axis 'E'",
        "every epilogue operand varies over the rows and columns of the product, or a part of them",
    ),
    "part_of_the_rows": (
        "x: bf16[(B T), K], w: bf16[N, K], t: f32[T]) {\n return (x @ w.T) * t: bf16",
        (1, 45), "'t' has dim (T), which is neither the rows (B T) nor the columns (N) of the product",
        "this release reads whole rows and columns; parts of a group come later",
    ),
    "opened_output": (
        "x: bf16[(B T), K], w: bf16[N, K]) {\n return x @ w.T: bf16[B, T, N]",
        (2, 9), "'out' has dim (B), which is neither the rows (B T) nor the columns (N) of the product",
        "this release reads whole rows and columns; parts of a group come later",
    ),
    # operands of the epilogue
    "interleaved_operand": (
        "x: bf16[M, K], w: bf16[(F s=2), K], z: bf16[M, (F s)]) {\n y = x @ w.T + z\n return y.s[0] * y.s[1]: bf16",
        (1, 47), "operand 'z' interleaves its lanes; this release prefetches each lane by itself",
        "store it with 's' first in its group",
    ),
    "operand_by_columns": (
        "x: bf16[M, K], w: bf16[N, K], z: bf16[N, M]) {\n return x @ w.T + z: bf16",
        (1, 41), "operand 'z' is stored by columns; this release prefetches rows", "store it as [M, N]",
    ),
    "integer_tile": (
        "x: bf16[M, K], w: bf16[N, K], z: i32[M, N]) {\n return x @ w.T + z: bf16",
        (1, 41), "operand 'z' is i32 over the whole tile; this release prefetches bf16, f16 and f32", None,
    ),
    "int8_operand": (
        "x: bf16[M, K], w: bf16[N, K], s: s8[M]) {\n return (x @ w.T) * s: bf16",
        (1, 41), "operand 's' is s8; an epilogue reads bf16, f16, f32, i64, i32 and bool", None,
    ),
    # operations
    "pick": (
        "x: bf16[M, K], w: bf16[N, K], t: i64[M]) {\n y = x @ w.T\n return y - pick(y, N, t): bf16",
        (3, 9), "output 'out' uses a finished reduction over whole rows in every element; that needs a second kernel "
        "over the rows, which comes in a later release",
        "return the reduction, and apply it in the epilogue of the next product",
    ),
    "pick_of_a_table": (
        "x: bf16[M, K], w: bf16[N, K], g: f32[N], t: i64[M]) {\n return pick(g, N, t) * (x @ w.T): bf16",
        (2, 9), "'pick' gives one value for each row, known when the row is finished; it is used in every element",
        "return it, or what follows from it, as a value for each row",
    ),
    "cast_to_s8": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return cast(x @ w.T, s8) * 2: bf16",
        (2, 9), "a cast from f32 to s8 is lowered in a later release", "write cast(x, s8, saturate)",
    ),
    "cast_to_integer": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return cast(x @ w.T, i32) * 2: bf16",
        (2, 9), "a cast from f32 to i32 is lowered in a later release", None,
    ),
    # outputs
    "inout": (
        "x: bf16[M, K], w: bf16[N, K], inout g: f32[N, M]) {\n g += x @ w.T",
        (1, 41), "operand 'g' is stored by columns; this release prefetches rows", "store it as [M, N]",
    ),
    "row_output": (
        "x: bf16[M, K], w: bf16[N, K], r: f32[M]) {\n return x @ w.T: bf16, q = r * 2: f32",
        (2, 28), "output 'q' is one value for each row, not one for each element of the product",
        "return it over the whole tile, or reduce over the other axis",
    ),
    "scalar_output": (
        "x: bf16[M, K], w: bf16[N, K], r: f32) {\n return x @ w.T: bf16, q = r * 2: f32",
        (2, 28), "output 'q' is one value, not one for each element of the product",
        "return it over the whole tile, or reduce over the other axis",
    ),
    "integer_output": (
        "x: bf16[M, K], w: bf16[N, K], i: i64[M], j: i64[N]) {\n return x @ w.T: bf16, q = i + j: i64",
        (2, 28), "output 'q' is i64; elements are stored in bf16, f16, f32, f8e4m3, f8e5m2 and s8", None,
    ),
    # reductions
    "partial_logsumexp": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return partial(logsumexp(x @ w.T, N)): f32",
        (2, 17), "a partial of 'logsumexp' is 2 values, and an output holds one",
        "return logsumexp(...), which is finished",
    ),
    "of_a_reduction": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return sum(sum(x @ w.T, M), N): f32",
        (2, 9), "this reduces one value for each column; a kernel reduces values of rows and columns",
        "reduce it before, and pass the result",
    ),
    "of_a_row_value": (
        "x: bf16[M, K], w: bf16[N, K], r: f32[M]) {\n return x @ w.T: bf16, s = partial(sum(r, M)): f32",
        (2, 36), "this reduces values of whole rows, of which there are no partials",
        "return it without partial(...)",
    ),
    "two_directions": (
        "x: bf16[M, K], w: bf16[N, K]) {\n y = x @ w.T\n return y * sum(y, M) * sum(y, N): f32",
        (3, 9), "output 'out' combines reductions that need several kernels", None,
    ),
    "softmax": (
        "x: bf16[M, K], w: bf16[N, K]) {\n y = x @ w.T\n return y / sum(y, N): f32",
        (3, 9), "output 'out' uses a finished reduction over whole rows in every element; that needs a second kernel "
        "over the rows, which comes in a later release",
        "return the reduction, and apply it in the epilogue of the next product",
    ),
    "integer_statistic": (
        "x: bf16[M, K], w: bf16[N, K]) {\n return c = sum(where(x @ w.T > 0, index(N), 0), N): i64",
        (2, 13), "output 'c' is i64; this release stores bf16, f16 and f32", None,
    ),
    # head-wise epilogues
    "cast_in_a_head": (
        "x: bf16[M, K], w: bf16[(H d=64), K]) {\n return sum(cast(x @ w.T, s8), d): f32",
        (2, 13), "a cast from f32 to s8 is lowered in a later release", "write cast(x, s8, saturate)",
    ),
    "int8_by_heads": (
        "x: bf16[M, K], w: bf16[(H d=64), K], g: s8[d]) {\n z = x @ w.T\n return z * sum(z, d) * g: bf16",
        (1, 48), "operand 'g' is s8; an epilogue reads bf16, f16, f32, i64, i32 and bool", None,
    ),
    "narrow_heads": (
        "x: bf16[M, K], w: bf16[(H d=40), K]) {\n return sum(x @ w.T, d): f32",
        (2, 13), "heads have 40 columns; a head-wise epilogue takes multiples of 16 up to 256", None,
    ),
    "heads_of_unknown_width": (
        "x: bf16[M, K], w: bf16[(H d), K]) {\n return sum(x @ w.T, d): f32",
        (2, 13), "the size of 'd' is d, but a head-wise epilogue needs a number",
        "declare it, as in d=64, or give --dims d=64",
    ),
    "over_heads": (
        "x: bf16[M, K], w: bf16[(H d=64), K]) {\n return sum(x @ w.T, H): f32",
        (2, 9), "a reduction over (H) in a head-wise epilogue", "reduce over the columns of a head, d",
    ),
    "tile_operand_by_heads": (
        "x: bf16[M, K], w: bf16[(H d=64), K], r: bf16[M, (H d)]) {\n return sum(x @ w.T + r, d): f32",
        (1, 48), "operand 'r' varies over rows and columns; a head-wise epilogue reads rows, heads, columns, "
        "and tables [rows, columns]", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name, monkeypatch):
    # A node keeps the place where it was first written, be it in another program: start without any.
    monkeypatch.setattr("coda.ir._interned", weakref.WeakValueDictionary())
    text, place, message, hint = REFUSALS[name]
    (program,) = load(f"program p({text} }}").programs.values()
    with pytest.raises(CodaError) as caught:
        lower(program)
    (diagnostic,) = caught.value.diagnostics
    span = diagnostic.span
    assert (diagnostic.message, diagnostic.hint) == (message, hint)
    assert (span and (span.line, span.column)) == place
    assert caught.value.source is program.source, "the message can show the line"
