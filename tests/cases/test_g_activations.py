"""G2 to G7: activations and RoPE have one name each, and positions are an operand."""

import pytest
import torch
import torch.nn.functional as F

from coda.errors import CodaError
from coda.runtime.reference import evaluate
from tests.gradients import check_gradients
from tests.support import program


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf"])
def test_g2_the_two_gelus(name):
    p = program(f"program p(x: f32[M]) {{ return y = {name}(x): f32 }}")
    x = torch.tensor([0.5, 3.0, -3.0, 1e4, -1e4])
    want = F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    torch.testing.assert_close(evaluate(p, {"x": x})["y"], want)
    check_gradients(p, {}, inputs={"x": x})


def test_g2_there_is_no_gelu_by_default():
    with pytest.raises(CodaError, match="there is no function 'gelu'"):
        program("program p(x: f32[M]) { return y = gelu(x): f32 }")


ROPE = "c: f32[P, f], s: f32[P, f], pos: i32[M]) {{ {dims} return y = {call}: {result} }}"


def half() -> str:
    return "program p(x: f32[M, d], " + ROPE.format(
        dims="dim d = 2*f;", call="rope_half(x, c[pos], s[pos])", result="f32"
    )


def test_g4_the_two_conventions_differ_by_a_permutation():
    """d = 8, position 1: rotating halves is not rotating neighbours."""
    pairs = "program p(x: f32[M, (f p=2)], " + ROPE.format(
        dims="", call="rope_interleaved(x, c[pos], s[pos])", result="f32[M, (f p)]"
    )
    x, angles = torch.randn(1, 8), torch.randn(2, 4)
    call = {"c": angles.cos(), "s": angles.sin(), "pos": torch.tensor([1], dtype=torch.int32)}
    halves = evaluate(program(half()), {"x": x, **call})["y"]
    neighbours = evaluate(program(pairs), {"x": x, **call})["y"]
    assert not torch.allclose(halves, neighbours)
    reordered = x.view(1, 2, 4).transpose(1, 2).reshape(1, 8)
    again = evaluate(program(pairs), {"x": reordered, **call})["y"]
    torch.testing.assert_close(again.view(1, 4, 2).transpose(1, 2).reshape(1, 8), halves)


def test_g6_only_q_is_rotated():
    p = program("""
        program p(x: f32[M, D], w: f32[(G d), D], c: f32[M, f], s: f32[M, f], const HQ, const HK) {
            dim G = HQ + HK
            dim d = 2*f
            q, k = split(x @ w.T, G = HQ | HK)
            return q = rope_half(q, c, s): f32, k: f32
        }""")
    check_gradients(p, {"M": 3, "D": 4, "f": 2, "HQ": 2, "HK": 1}, ["x", "w"])


def test_g7_packed_sequences_have_a_position_for_each_token():
    p = program(half())
    x, angles = torch.randn(5, 8), torch.randn(3, 4)
    pos = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)  # two sequences in one batch
    inputs = {"x": x, "c": angles.cos(), "s": angles.sin(), "pos": pos}
    packed = evaluate(p, inputs)["y"]
    alone = evaluate(p, {**inputs, "x": x[3:], "pos": pos[:2]})["y"]
    assert torch.equal(packed[3:], alone)
    check_gradients(p, {}, ["x"], inputs=inputs)
