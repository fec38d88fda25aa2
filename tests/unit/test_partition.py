"""Block programs become kernels that give the same bits and fit together to the same program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from coda.cost import GPUS
from coda.frontend import load_path
from coda.ir import Program
from coda.passes import derive, optimize
from coda.passes.delay_norm import delay_norm
from coda.passes.differentiate import differentiate
from coda.passes.kernels import Partition, assemble
from coda.passes.merge import MOST
from coda.passes.partition import partition
from coda.passes.simplify import simplify
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of
from coda.runtime.blocks import evaluate_partition
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import _by_time, lower_program
from tests.gradients import check_text
from tests.programs import random_epilogue, tour
from tests.support import program, same

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"M": 3, "N": 8, "K": 5, "D": 8, "F": 4, "A": 8, "V": 7, "P": 6, "f": 2}


def kinds(p: Program) -> list[str]:
    return [k.kind for k in partition(p).kernels]


def check(p: Program, sizes: dict[str, int] = SIZES) -> Partition:
    """Kernels are programs by themselves; together they are the program, and give its bits."""
    parts = partition(p)
    for kernel in parts.kernels:
        check_text(kernel.program)
    assert simplify(assemble(parts)) == simplify(parts.program), print_program(assemble(parts))
    symbols = {s.name for a in p.axes for s in a.size.free_symbols}
    inputs = random_inputs(p, {n: sizes.get(n, 2) for n in symbols})
    bound = bind(p, shapes_of(inputs), {n: sizes.get(n, 2) for n in symbols})
    got, want = evaluate_partition(parts, inputs, dims=bound), evaluate(p, inputs, dims=bound)
    assert got.keys() == want.keys()
    assert all(same(got[n], want[n]) for n in want)
    return parts


# One product.


@settings(max_examples=80, deadline=None)
@given(random_epilogue())
def test_random_programs(p):
    parts = check(p, {"M": 3, "N": 4, "K": 2})
    assert sum(k.kind == "gemm" for k in parts.kernels) == 1


@pytest.mark.parametrize("name", [n for n in tour() if n != "moe"])
def test_tour(name):
    (p,) = load_path(tour()[name], {"HQ": 2, "HK": 1} if name == "qkv" else {}).programs.values()
    check(p, SIZES | {"T": 3})


def test_an_epilogue_program_is_one_kernel():
    for name in ("linear", "linear_bias_gelu", "swiglu", "swiglu_preact", "residual_stats"):
        (p,) = load_path(EXAMPLES / f"{name}.coda").programs.values()
        (kernel,) = partition(p).kernels
        assert kernel.kind == "gemm" and kernel.program.outputs == p.outputs


def test_a_statistic_is_finished_behind_its_kernel():
    (p,) = load_path(EXAMPLES / "residual_rstd.coda").programs.values()
    parts = check(p)
    assert [k.kind for k in parts.kernels] == ["gemm", "finish"]
    assert [e.partial for e in parts.edges] == [True]


def test_head_wise_statistics_need_no_kernel():
    p = program("""
        program p(h: bf16[M, D], w: bf16[(H d=16), D]) {
            q = h @ w.T
            return y = q * rsqrt(mean(q * q, d) + 1e-6): bf16
        }""")
    assert kinds(p) == ["gemm"]


def test_a_norm_whose_result_is_needed_whole_is_a_row_kernel():
    (p,) = load_path(tour()["gemma"]).programs.values()
    parts = check(p)
    assert [k.kind for k in parts.kernels] == ["gemm", "row"]
    (edge,) = parts.edges
    assert str(edge.type) == "bf16[M, D]"  # y, which the program rounds, and not the f32 product


# Blocks.

NORM_LINEAR = """
program p(o: bf16[M, A], u: bf16[D, A], x: bf16[M, D], g: bf16[D], w: bf16[N, D], eps: f32 = 1e-5) {
    h = cast(x + o @ u.T, bf16)
    return h, y = rms_norm(h, g, eps) @ w.T: bf16
}"""


def test_a_delayed_norm_needs_no_row_kernel():
    p = program(NORM_LINEAR)
    assert [k.kind for k in check(p).kernels] == ["gemm", "row", "gemm"]
    parts = check(delay_norm(p)[0])
    assert [k.kind for k in parts.kernels] == ["gemm", "finish", "gemm"]
    first = parts.kernels[0].program
    assert [str(o.type) for o in first.outputs] == ["bf16[M, D]", "bf16[M, D]", "partial[sum, D] f32[M]"]  # h, h * g


def test_a_value_is_computed_again_where_that_is_cheaper():
    p = program("""
        program p(x: bf16[M, D], w: bf16[D2, D], v: bf16[D3, D2]) {
            dim D2 = D
            dim D3 = D
            a = silu(x @ w.T)
            return a: bf16, y = exp(x) @ w.T @ v.T: bf16, z = x * 2: bf16
        }""")
    parts = check(p)
    assert [k.kind for k in parts.kernels].count("map") == 1


def test_delaying_saves_bytes():
    """The normalised rows are neither written nor read; partial sums are small."""
    sizes = {"M": 8192, "D": 4096, "A": 4096, "N": 14336}
    plain, delayed = (
        partition(p).bytes.subs({s: sizes[s.name] for s in partition(p).bytes.free_symbols})
        for p in (program(NORM_LINEAR), delay_norm(program(NORM_LINEAR))[0])
    )
    assert plain - delayed > 0.9 * 8192 * 4096 * 2


def test_where_things_run():
    parts = partition(delay_norm(program(NORM_LINEAR))[0])
    (rsqrt,) = (n for n in parts.program.nodes() if n.op == "rsqrt")
    assert parts.places(rsqrt) == ["p_2_finish"]
    assert all(parts.places(n) for n in parts.program.nodes() if n.args)
    assert any("p_2_finish: the tiles of a kernel reduce a part each" in str(n) for n in parts.notes)


def test_mlp_block(golden):
    """Forward: a row kernel and two products. Backward: four kernels with products, two that finish statistics."""
    (p,) = load_path(EXAMPLES / "mlp_block.coda").programs.values()
    backward = differentiate(delay_norm(p)[0])
    forward, back = (check(q) for q in (backward.forward, delay_norm(backward.backward)[0]))
    assert [k.kind for k in forward.kernels] == ["row", "gemm", "gemm"]
    assert [k.kind for k in back.kernels] == ["gemm", "finish", "gemm", "finish", "gemm", "gemm"]
    kernels = [*forward.kernels, *back.kernels]
    golden("partition/mlp_block.coda", "\n".join(print_program(k.program) for k in kernels))


def test_a_kernel_runs_by_itself_given_its_sizes():
    p = program("program p(s: f32[M], const D) { return y = s / D: f32 }")
    y = evaluate(p, {"s": torch.ones(3)}, dims={"D": 4})["y"]
    assert torch.equal(y, torch.full((3,), 0.25))


def test_accumulating_gradients():
    p = program("program p(x: bf16[M, K], w: bf16[N, K]) { return y = x @ w.T: bf16 }")
    parts = check(differentiate(p, accumulate=["w"]).backward)
    assert [o.into for k in parts.kernels for o in k.program.outputs] == ["d_w", None]


def test_results_that_are_parameters():
    p = program("program p(x: bf16[M, N], r: f32[M]) { return y = x: bf16, z = r: f32 }")
    check(p)
    assert torch.is_tensor(evaluate_partition(partition(p), random_inputs(p, {"M": 2, "N": 3}))["y"])


TRANSPOSED = """
program p(q: bf16[M, H=8, T, d=64], k: bf16[M, J=2, T, d], w: bf16[(H d), N=512], v: bf16[(J d), N]) {
    return y = layout(q, [(M T), (H d)]) @ w + layout(k, [(M T), (J d)]) @ v: f32[(M T), N]
}
"""


def test_a_transposed_operand_of_a_product_is_written_out():
    """Each by itself: the heads of q and of k are two loops, and no kernel runs one inside the other."""
    parts = check(program(TRANSPOSED))
    assert [k.kind for k in parts.kernels] == ["map", "map", "gemm"]


def test_an_estimate_counts_bytes_operations_and_launches():
    p = load_path(EXAMPLES / "llama3_block.coda").programs["llama3_mlp"]
    sizes = {"M": 8192, "D": 4096, "A": 4096, "F": 14336}
    together, apart = (partition(optimize(p)[0], most) for most in (MOST, {}))
    products = 2 * 8192 * 4096 * (4096 + 3 * 14336) / GPUS["h200"].bf16_flops
    assert products < together.seconds(sizes) < apart.seconds(sizes) < 1.1 * products
    assert together.seconds({}) > 0  # sizes that are not known have some


def test_ways_to_lower_are_tried_by_their_estimated_time():
    backward = optimize(derive(load_path(EXAMPLES / "llama3_block.coda").programs["llama3_mlp"])[0].backward)[0]
    times = [partition(backward, most).seconds({}) for most in _by_time(backward, {})]
    assert times == sorted(times)
    assert len(set(times)) == len(times) > 1


# Statistics of one stage that another reads.


def test_a_sum_over_heads_in_pieces_is_finished_before_rows_read_it():
    """A row of heads cut in halves is no one loop: the rows that read its sum are those of a kernel behind it. What is
    finished there is not begun again where a later sum reads it."""
    p = program("""program p(a: f32[M, (H=4 f=96)], b: f32[M, (H f)], x: f32[M, D], y: bf16[M, D], w: bf16[N, D]) {
        dim d = 192
        s = sum(concat(a, b, d = f | f), (H d))
        q = sum(x * s * x, D)
        z = cast(y @ w.T, bf16)
        return t = sum(z * z, N) * s + q: f32[M], v = x * s: bf16[M, D]
    }""")
    kernels = check(p, SIZES).kernels
    assert [k.kind for k in kernels] == ["map", "finish", "row", "gemm", "finish"]
    assert kernels[3].reads == {"y", "w"} and kernels[4].reads >= {"s", "q"}
    lower_program(p)


def test_a_statistic_of_other_columns_is_made_by_a_kernel_before():
    p = program("""program p(a: f32[M, A], x: f32[M, D]) {
        r = rsqrt(mean(a * a, A))
        return s = sum(x * r * x, D): f32[M], z = a * r: bf16[M, A]
    }""")
    first, second = check(p, SIZES).kernels
    assert first.kind == second.kind == "row" and first.writes == {"r", "z"} and second.reads == {"x", "r"}
    lower_program(p)


# Statistics over other columns than those of the kernel that uses them.

TWO_WIDTHS = {
    "scaled": """program p(x: bf16[M, D], w: bf16[E, D]) {
        return y = cast(x * tanh(sum(x, D)), bf16) @ w.T: bf16
    }""",
    "shifted": """program p(x: bf16[M, D], g: bf16[D], w: bf16[E, D]) {
        return y = cast((x + g) * tanh(sum(x, D)), bf16) @ w.T: bf16
    }""",
    "norm of a norm": """program p(x: bf16[M, D], g: f32[D], b: f32[D], w: bf16[E, D]) {
        n = x * rsqrt(mean(x * x, D) + 0.01) * g
        return y = cast(n * rsqrt(mean(n * n, D) + 0.01) * b, bf16) @ w.T: bf16
    }""",
}


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("name", TWO_WIDTHS)
def test_a_row_kernel_has_columns_of_one_width(name, memory):
    """The gradient of a row statistic is a sum over E; what it is multiplied by has columns over D."""
    backward = derive(program(TWO_WIDTHS[name]), memory=memory)[0].backward
    assert lower_program(backward)
    parts = check(backward, SIZES | {"E": 5})
    for kernel in (k for k in parts.kernels if k.kind == "row"):
        assert not {"D", "E"} <= {a.name for n in kernel.program.nodes() for a in n.type.axes}


def test_the_axes_of_a_table_are_no_columns():
    """Gathered rows have the width of what they are multiplied by, so their statistics may be used beside it."""
    p = program("""program p(x: bf16[M, D], const t: f32[P, D], i: i64[M]) {
        y = x * t[i]
        return n = y * rsqrt(mean(y * y, D) + 0.01): bf16
    }""")
    assert [k.kind for k in check(p).kernels] == ["row"]


def test_sums_over_the_rows_go_along_with_a_row_kernel_that_reads_the_same():
    """The gradient of the last bias, of d_y alone, beside the LayerNorm through which d_y also passes."""
    p = program("""program p(x: bf16[M, D], g: bf16[D], b: bf16[D], w: bf16[D, F], v: bf16[F, D], c: bf16[D]) {
        return y = x + relu(layer_norm(x, g, b, 1e-5) @ w) @ v + c: bf16
    }""")
    parts = check(derive(p)[0].backward)
    (row,) = (k for k in parts.kernels if k.kind == "row")
    assert not any(k.kind == "map" for k in parts.kernels)
    assert [o.is_partial for o in row.program.outputs] == [False, True]


def test_a_kernel_does_not_wait_for_a_product_that_reads_what_it_makes():
    """Rows of a statistic of other columns come a kernel later, but not with those behind the next product."""
    p = program("""program p(x: bf16[M, D], w: bf16[D, F], u: bf16[F, D], a: bf16[R, D], b: bf16[F, R], g: bf16[F],
                              v: bf16[D, F]) {
        n = x * rsqrt(mean(x * x, D) + 0.01)
        y = cast(sigmoid(n @ w) * (n @ u.T + 2 * (n @ a.T) @ b.T), bf16)
        return y = cast(x + rms_norm(y, g, 1e-5) @ v.T, bf16): bf16
    }""")
    backward = derive(p, memory="low")[0].backward
    check(backward, SIZES | {"R": 2})
    lower_program(backward)


def test_a_sum_that_is_returned_is_finished_with_what_is_made_of_it():
    """Two biases of one gradient, in f32 and rounded."""
    p = program("program p(x: bf16[M, D], b: f32[D], c: bf16[D]) { return y = x + b + c: bf16 }")
    backward = derive(p)[0].backward
    assert [k.kind for k in check(backward).kernels].count("finish") == 1
    lower_program(backward)
