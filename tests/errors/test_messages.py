"""The exact message of each common mistake, as a user sees it: tests/golden/errors/NAME.txt."""

from __future__ import annotations

import pytest

from coda.errors import CodaError, Source
from coda.frontend import load


def linear(body: str, params: str = "x: bf16[M, K], w: bf16[N, K], bias: bf16[N]?, r: f32[M]") -> str:
    return f"program linear({params}) {{\n    {body}\n}}\n"


SYNTAX = {
    "missing_colon": "program linear(x bf16[M, K]) {\n    return x\n}\n",
    "missing_open_brace": "program linear(x: bf16[M, K])\n    return x\n}\n",
    "missing_close_brace": "program linear(x: bf16[M, K]) {\n    return x\n",
    "missing_close_brace_before_program": "program a(x: bf16[M]) {\n    return x\n\nprogram b() {\n    return 1\n}\n",
    "missing_comma_in_parameters": "program linear(x: bf16[M, K]\n               w: bf16[N, K]) {\n    return x\n}\n",
    "missing_comma_in_call": linear("return max(x w): bf16"),
    "missing_comma_in_return": linear("return x: bf16 w: bf16"),
    "missing_dtype": "program linear(x: [M, K]) {\n    return x\n}\n",
    "unclosed_parenthesis": linear("z = sum(x @ w.T, N\n    return z: f32"),
    "unclosed_bracket": "program linear(x: bf16[M, K) {\n    return x\n}\n",
    "equals_in_condition": linear("return where((r = 0), 1, r): f32"),
    "comparison_as_assignment": linear("z == x @ w.T\n    return z: bf16"),
    "bare_expression": linear("silu(x @ w.T)"),
    "power": linear("return (x @ w.T) ** 2: bf16"),
    "chained_comparison": linear("return where(0 < r < 1, r, 0): f32"),
    "ternary": linear("return r > 0 ? r : 0"),
    "transpose_call": linear("return x @ w.T(): bf16"),
    "bracketed_group": "program p(x: bf16[[B T], D]) {\n    return x\n}\n",
    "reserved_word": "program p(return: bf16[M]) {\n    return x\n}\n",
    "subtract_assign": linear("r -= 1\n    return r: f32"),
    "dangling_operator": linear("z = x @ w.T +\n    return z: bf16"),
    "unknown_character": linear("return r % 2: f32"),
    "python_def": "def linear(x):\n    return x\n",
    "empty_return": linear("return"),
}

NAMES = {
    "unknown_name": linear("return x @ w.T + bais: bf16"),
    "unknown_function": linear("return gelu(x @ w.T): bf16"),
    "unknown_dtype": linear("return x @ w.T: bfloat16"),
    "unknown_axis": linear("return sum(x @ w.T, P): f32"),
    "unknown_option": linear("return rms_norm(x, r, 1e-5, centre=1): bf16"),
    "axis_as_value": linear("return (x @ w.T) / N: bf16"),
    "value_named_as_axis": linear("M = x @ w.T\n    return M: bf16"),
    "value_named_as_dtype": linear("f32 = x @ w.T\n    return f32"),
    "parameter_without_type": "program linear(x, w: bf16[N, K]) {\n    return x @ w.T: bf16\n}\n",
    "parameter_twice": "program linear(x: bf16[M, K], x: bf16[N, K]) {\n    return x: bf16\n}\n",
    "program_twice": linear("return r: f32") + linear("return r: f32"),
    "axis_twice_in_type": "program p(x: bf16[D, D]) {\n    return x\n}\n",
    "result_named_twice": linear("return y = r: f32, y = r + 1: f32"),
    "fn_named_as_builtin": "fn silu(x) {\n    return x\n}\n" + linear("return r: f32"),
    "several_at_once": linear("y = sinh(x @ w.T)\n    z = y + bais\n    return y: bf16, z: bf61, cos(r): f32"),
    "assigned_twice": linear("a, a = split(x, K = K | *)\n    return a: bf16"),
}

CONSUMER = "x: bf16[M, K], w: bf16[N, K], s: partial[sum, K] f32[M]"

TYPES = {
    "contraction_of_different_axes": linear("return x @ w: bf16"),
    "contraction_of_vector": linear("return r @ w: bf16"),
    "batch_on_the_left": linear("return x @ w.T: bf16", "x: bf16[B, M, K], w: bf16[N, K]"),
    "batch_on_the_right": linear("return x @ w: bf16", "x: bf16[M, K], w: bf16[B, K, N]"),
    "two_batches": linear("return x @ w: bf16", "x: bf16[B, M, K], w: bf16[E, K, N]"),
    "contraction_in_a_batch": linear("return x @ w: bf16", "x: bf16[B, M, K], w: bf16[B, N, K]"),
    "product_of_four_dims": linear("return x @ w: bf16", "x: bf16[A, B, M, K], w: bf16[A, B, K, N]"),
    "transposed_vector": linear("return x @ (x @ r.T): bf16"),
    "product_of_two_dtypes": linear("return x @ w.T: bf16", "x: bf16[M, K], w: f16[N, K]"),
    "product_of_integers": linear("return x @ w.T: f32", "x: s8[M, K], w: s8[N, K]"),
    "square_without_second_axis": linear("return x @ w.T: bf16", "x: bf16[M, D], w: bf16[D, D]"),
    "result_axes": linear("return x @ w.T: bf16[M, K]"),
    "result_lacks_axis": linear("return x @ w.T: bf16[M]"),
    "optional_outside_sum": linear("return silu(bias) + x @ w.T: bf16"),
    "optional_on_left_of_minus": linear("return bias - x @ w.T: bf16"),
    "condition_not_bool": linear("return where(r, x @ w.T, 0): bf16"),
    "slice_out_of_range": linear("return (x @ w.T).s[2]: bf16", "x: bf16[M, K], w: bf16[(s=2 F), K]"),
    "slice_of_unknown_axis": linear("return (x @ w.T).z[0]: bf16", "x: bf16[M, K], w: bf16[(s=2 F), K]"),
    "attribute": linear("return x @ w.t: bf16"),
    "gather_by_float": linear("return r[r]: f32"),
    "split_does_not_add_up": linear("a, b = split(x, K = A | B)\n    return a, b", "x: bf16[M, K], const A, const B"),
    "split_count": linear("a, b, c = split(x, K = A | *)\n    return a: bf16", "x: bf16[M, K], const A"),
    "two_sizes_of_axis": "program p(x: bf16[s=2, M], y: bf16[s=3, M]) {\n    return x + y: bf16\n}\n",
    "axis_of_two_sizes": linear("dim K = 2*K\n    return x @ w.T: bf16"),
    "wrong_arity": linear("return silu(x, w): bf16"),
    "reduction_without_axis": linear("return sum(x): f32"),
    "keyword_in_condition": linear("return where(r = 0, 1, r): f32"),
    "partial_of_value": linear("return partial(r): f32"),
    "partial_rounded": linear("return partial(sum(x @ w.T, N)): bf16"),
    "partial_mean": linear("return partial(mean(x @ w.T, N)): f32"),
    "partial_used_unfinished": linear("return s * (x @ w.T): bf16", CONSUMER),
    "partial_returned_again": linear("return x @ w.T: bf16, s", CONSUMER),
    "partial_of_mean": linear("return finish(s) * (x @ w.T): bf16", CONSUMER.replace("sum", "mean")),
    "partial_of_unknown_reduction": linear("return finish(s) * (x @ w.T): bf16", CONSUMER.replace("sum", "mxa")),
    "partial_of_bf16": linear("return finish(s) * (x @ w.T): bf16", CONSUMER.replace("f32", "bf16")),
    "partial_without_axes": linear("return finish(s) * (x @ w.T): bf16", CONSUMER.replace("f32[M]", "f32")),
    "partial_over_a_kept_axis": linear("return finish(s) * (x @ w.T): bf16", CONSUMER.replace("sum, K", "sum, M")),
    "partial_optional": linear("return finish(s) * (x @ w.T): bf16", CONSUMER + "?"),
    "partial_as_type_of_a_result": linear("return partial(sum(x @ w.T, N)): partial[sum, N] f32[M]"),
    "partial_in_an_extern": "extern f(s: partial[sum, K] f32[M]) -> y: f32[M]\n" + linear("return r: f32"),
    "finish_of_finished": linear("return finish(r): f32"),
    "cast_to_value": linear("return cast(x, r): bf16"),
    "integer_default": "program p(x: i64[M], pad: i64 = 0.5) {\n    return x + pad: i64\n}\n",
    "tensor_default": "program p(x: bf16[M] = 0) {\n    return x\n}\n",
    "accumulate_into_input": linear("r += sum(x @ w.T, N)\n    return r: f32"),
    "inout_never_written": linear("return x @ w.T: bf16", "x: bf16[M, K], w: bf16[N, K], inout y: f32[M, N]"),
    "inout_read": linear("y += x @ w.T\n    return y * 2: bf16", "x: bf16[M, K], w: bf16[N, K], inout y: f32[M, N]"),
    "no_result": linear("z = x @ w.T"),
    "stack_without_axis": linear("return stack(r, 2): f32"),
}

FUNCTIONS = {
    "library_argument_missing": linear("return layer_norm(x, bias): bf16"),
    "library_too_many_arguments": linear("return swiglu(x, w): bf16"),
    "library_axis_unclear": linear("return softmax(x @ w.T): f32", "x: bf16[M, K], w: bf16[(A B), K]"),
    "library_inner_error": linear("return rms_norm_rounded(x, w, 1e-5, x): bf16", "x: bf16[M, K], w: bf16[K]"),
    "library_argument_lacks_axis": linear("return rms_norm(x, g, 1e-5): bf16", "x: bf16[M, K], g: bf16[N]"),
    "library_slice": linear("return swiglu(x @ w.T): bf16"),
    "recursion": "fn f(x) {\n    return g(x)\n}\nfn g(x) {\n    return f(x) + 1\n}\n" + linear("return f(r): f32"),
    "fn_without_return": "fn f(x) {\n    y = x\n}\n" + linear("return f(r): f32"),
    "fn_gives_two": "fn f(x) {\n    return x, x + 1\n}\n" + linear("return f(r): f32"),
    "fn_names_no_axis": "fn f(x) {\n    return sum(x, N)\n}\n" + linear("return f(x @ w.T): f32"),
    "fn_error_inside": "fn f(x) {\n    return x + y\n}\n" + linear("return f(r): f32"),
}

LATER = {
    "ragged": "program p(x: bf16[P, D], offs: i32[E1], w: bf16[N, D]) {\n    dim P = ragged(E, offs)\n"
    "    return x @ w.T: bf16\n}\n",
    "batched": "program p(x: bf16[M, K], w: bf16[E, N, K]) {\n    return x @ w[E].T: bf16\n}\n",
    "scatter_add": "program p(x: bf16[M, K], t: i32[M]) {\n    return scatter_add(x, T = t): f32\n}\n",
}


@pytest.mark.parametrize("name", [n for table in (SYNTAX, NAMES, TYPES, FUNCTIONS, LATER) for n in table])
def test_message(name, golden):
    text = (SYNTAX | NAMES | TYPES | FUNCTIONS | LATER)[name]
    with pytest.raises(CodaError) as caught:
        load(Source(text, "linear.coda"))
    message = str(caught.value)
    assert all(d.span is not None for d in caught.value.diagnostics), "every mistake has its place"
    golden(f"errors/{name}.txt", message + "\n")
