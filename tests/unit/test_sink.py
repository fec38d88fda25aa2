"""Row factors behind what is linear in a product: found by meaning, equal over the reals, and what it saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda.frontend import load_path
from coda.passes import derive, optimize
from coda.passes.prove import prove
from coda.passes.sink import sink
from coda.verify import verify
from tests.support import program

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = "x: bf16[M, D], w: bf16[(H d), D], v: bf16[(H d), D], c: f32[M, f], s: f32[M, f], b: f32[(H d)], eps: f32 = 1e-5"
R = "rsqrt(mean(x * x, D) + eps)"


def returning(result: str, layout: str = "") -> str:
    return f"program p({HEAD}) {{ dim d = 2*f; r = {R}; acc = x @ w.T; return y = {result}: bf16{layout} }}"


MOVES = {  # the result, and what it is after the pass
    "rope_half(r * acc, c, s)": "r * rope_half(acc, c, s)",
    "-(r * acc)": "r * -acc",
    "r * acc + r * (x @ v.T)": "r * (acc + x @ v.T)",
    "(r * acc) * b": "r * (acc * b)",
    "exp(b) * (r * acc)": "r * (exp(b) * acc)",
    "(acc * r) / 2.0": "r * (acc / 2.0)",
}


@pytest.mark.parametrize("result", MOVES)
@pytest.mark.parametrize("layout", ["", "[H, M, d]"])
def test_moves(result: str, layout: str) -> None:
    before = program(returning(result, layout))
    after, (note,) = sink(before)
    verify(after)
    assert after.outputs == program(returning(MOVES[result], layout)).outputs
    assert str(note).startswith("sink: a row factor of 'y' is behind all that is linear")
    assert prove(before, after, {"M": 2, "D": 2, "H": 1, "f": 1})


STAYS = [
    "r * acc",  # it is last
    "r * acc + b",  # no factor of the sum
    "silu(r * acc)",
    "r * acc + acc",
    "(r * acc) * (r * acc)",
    "rope_half(rms_norm_heads(r * acc), c, s)",
    "rsqrt(mean(acc * acc, (H d)) + eps) * acc",  # not known without the product
]


@pytest.mark.parametrize("result", STAYS)
def test_stays(result: str) -> None:
    result = result.replace("rms_norm_heads(r * acc)", "(r * acc) * rsqrt(mean(r * acc * (r * acc), d) + eps)")
    p = program(returning(result))
    assert sink(p) == (p, ())


def test_a_factor_that_varies_along_a_cut_axis_stays() -> None:
    """1/rms of each head is no factor of a part of the heads that one may pull out of the whole."""
    p = program("program p(x: bf16[M, D], w: bf16[(H d), D], g: f32[G, D]) {"
                " dim H = 2*G; a, b = split(x @ w.T, H = G | G); r = rsqrt(mean(g * g, D));"
                " return y = concat(r * a, r * b, H): bf16 }")  # fmt: skip
    assert sink(p) == (p, ())


def test_rotated_heads_are_read_back_from_q_and_k() -> None:
    """The backward of a q, k, v projection keeps 1/rms and no product."""
    backward, _ = derive(load_path(EXAMPLES / "llama3_block.coda").programs["llama3_qkv"])
    assert [o.name for o in backward.forward.outputs] == ["q", "k", "v", "r"]
    assert backward.saved == ("q", "k", "v", "r")


def test_the_factor_may_be_of_rows_that_another_product_made() -> None:
    """A norm behind a product, as that of the next layer: q is read back as well."""
    backward, notes = derive(program(
        "program p(o: bf16[M, A], v: bf16[D, A], w: bf16[(H d), D], c: f32[M, f], s: f32[M, f], eps: f32 = 1e-5) {"
        " dim d = 2*f; x = cast(o @ v.T, bf16); n = x * rsqrt(mean(x * x, D) + eps);"
        " return x, q = rope_half(n @ w.T, c, s): bf16[M, H, d] }"))  # fmt: skip
    assert any(n.rule == "sink" for n in notes)
    assert not any(name.startswith("acc") for name in backward.saved)


def test_eager_rounding_moves_nothing() -> None:
    p = program(returning("rope_half(r * acc, c, s)"))
    assert not any("sink" in str(n) for n in optimize(p, "eager")[1])
