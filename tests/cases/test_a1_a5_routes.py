"""A1, A2, A3, A5: operand layouts. Every layout gives the right values, by a route that says what it did."""

import pytest
import torch

from coda.errors import CodaError
from coda.runtime.callable import CompiledProgram
from coda.runtime.reference import evaluate
from tests.support import BIAS_GELU, RESIDUAL_STATS, bf16, kernel, program, same

M, N, K = 64, 64, 64


def check(text: str, route: str, copied: set[str] | None = None, **operands: torch.Tensor) -> CompiledProgram:
    """The call gives what contiguous operands give, takes the expected route and leaves its operands alone."""
    f = kernel(text)
    before = {n: x.clone() for n, x in operands.items()}
    results = f(**operands)
    want = evaluate(f.program, {n: x.contiguous() for n, x in operands.items()})
    for got, expected in zip(results if isinstance(results, tuple) else (results,), want.values(), strict=True):
        assert same(got, expected)
    assert f.last_route is not None
    assert f.last_route.kind == route, str(f.last_route)
    if copied is not None:
        assert set(f.last_route.copied) == copied
    assert all(torch.equal(x, before[n]) for n, x in operands.items())
    return f


def test_a1_a_tile_operand_of_another_shape_is_refused_before_any_build():
    def build(*args):
        raise AssertionError("a build was started")

    f = CompiledProgram(program(RESIDUAL_STATS), build=build, device_type="cpu")
    o = bf16(M, 32)
    with pytest.raises(CodaError) as caught:
        f(o, bf16(N, 32), o)  # the residual is operand A itself: (M, K), and K is not N
    assert "operand 'x' has shape [64, 32], expected bf16[M, N] = [64, 64]: dim 1 is 32, not 64" in str(caught.value)
    assert "N = 64 was fixed by operand 'w'" in str(caught.value)


LAYOUTS = {
    "row pitch 65": lambda m, n: bf16(m * 65 + 64).as_strided((m, n), (65, 1)),
    "odd storage offset": lambda m, n: bf16(m * n + 1)[1:].view(m, n),
    "columns of a wider tensor, unaligned": lambda m, n: bf16(m, n + 8)[:, 3 : n + 3],
    "every other column": lambda m, n: bf16(m, 2 * n)[:, ::2],
    "transposed": lambda m, n: bf16(n, m).T,
    "expanded row": lambda m, n: bf16(1, n).expand(m, n),
    "expanded column": lambda m, n: bf16(m, 1).expand(m, n),
    "overlapping rows": lambda m, n: bf16(m * 8 + n).as_strided((m, n), (8, 1)),
}
REGULAR = {
    "contiguous": lambda m, n: bf16(m, n),
    "columns of a wider tensor, aligned": lambda m, n: bf16(m, n + 16)[:, 8 : n + 8],
    "every other row": lambda m, n: bf16(2 * m, n)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["o", "w", "x"])
def test_a2_a5_an_irregular_operand_is_copied_and_named(layout, which):
    operands = {"o": bf16(M, K), "w": bf16(N, K), "x": bf16(M, N)}
    operands[which] = LAYOUTS[layout](*operands[which].shape)
    f = check(RESIDUAL_STATS, "copy", {which}, **operands)
    assert f.artifact.runs == 1
    assert f"operand '{which}'" in f.last_route.reason


@pytest.mark.parametrize("layout", REGULAR)
@pytest.mark.parametrize("which", ["o", "w", "x"])
def test_a2_a_regular_operand_is_taken_as_it_is(layout, which):
    operands = {"o": bf16(M, K), "w": bf16(N, K), "x": bf16(M, N)}
    operands[which] = REGULAR[layout](*operands[which].shape)
    check(RESIDUAL_STATS, "kernel", set(), **operands)


def test_a2_one_row_may_have_any_pitch():
    check(RESIDUAL_STATS, "kernel", o=bf16(M, K)[:1], w=bf16(N, K), x=bf16(M, N)[:1])
    one = bf16(1, K).as_strided((1, K), (7, 1))  # the pitch of the only row is never used
    check(RESIDUAL_STATS, "kernel", o=one, w=bf16(N, K), x=bf16(1, N))


@pytest.mark.parametrize("k", [63, 10, 1])
def test_a2_an_odd_contraction_is_padded_in_copies(k):
    check(RESIDUAL_STATS, "copy", {"o", "w"}, o=bf16(M, k), w=bf16(N, k), x=bf16(M, N))


def test_a2_unaligned_outputs_are_written_through_an_aligned_copy():
    f = kernel(RESIDUAL_STATS)
    operands = (bf16(M, K), bf16(10, K), bf16(M, 16)[:, :10])
    h, s = f(*operands)
    assert h.is_contiguous()
    want = evaluate(f.program, dict(zip("owx", operands, strict=True)))
    assert same(h, want["h"])
    assert same(s, want["s"])


def test_a3_a_bias_at_an_odd_address_needs_no_copy():
    bias = bf16(N + 1)[1:]
    assert bias.data_ptr() % 4
    check(BIAS_GELU, "kernel", x=bf16(M, K), w=bf16(N, K), bias=bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a5_strict_refuses_with_a_sentence(layout):
    f = kernel(RESIDUAL_STATS, fallback="strict")
    with pytest.raises(CodaError, match=r"program 'residual_stats': operand 'o' (has|starts)"):
        f(LAYOUTS[layout](M, K), bf16(N, K), bf16(M, N))
    assert f.artifact.runs == 0


def test_a5_fallback_reference_copies_nothing():
    f = kernel(RESIDUAL_STATS, fallback="reference")
    f(bf16(M, 2 * K)[:, ::2], bf16(N, K), bf16(M, N))
    assert f.last_route.kind == "reference"
    assert f.artifact.runs == 0
