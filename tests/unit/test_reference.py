"""The reference interpreter against torch, operation by operation and program by program."""

import math

import pytest
import torch
import torch.nn.functional as F

from coda.dtypes import BF16, BOOL, F8E4M3, F32, I32, I64, TABLE
from coda.errors import CodaError
from coda.ir import Axis, Output, Param, Program
from coda.ops import build
from coda.runtime.philox import philox4x32, uniform
from coda.runtime.reference import evaluate
from tests.support import BIAS_GELU, RESIDUAL_STATS, bf16, operand, program, same

SPECIAL = torch.tensor(
    [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, 1e-30, 1e-42,
     math.inf, -math.inf, math.nan]
)  # fmt: skip
UNARY = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf, "relu": F.relu,
    "silu": F.silu, "gelu_erf": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus, "hardswish": F.hardswish,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge,
}  # fmt: skip


def one(node, **inputs):
    """The value of a single expression over the given operands."""
    leaves = [n for n in Program("p", (), (Output("y", node, node.type),)).nodes() if n.op == "input"]
    params = tuple(Param(n.attr("name"), n.type) for n in leaves)
    return evaluate(Program("p", params, (Output("y", node, node.type),)), inputs)["y"]


@pytest.mark.parametrize("op", sorted(UNARY))
def test_unary_at_special_values(op):
    assert same(one(build(op, operand("a", F32, "N")), a=SPECIAL), UNARY[op](SPECIAL))


@pytest.mark.parametrize("op", sorted(BINARY))
def test_binary_at_all_pairs_of_special_values(op):
    node = build(op, operand("a", F32, "M"), operand("b", F32, "N"))
    assert same(one(node, a=SPECIAL, b=SPECIAL), BINARY[op](SPECIAL[:, None], SPECIAL[None]))


@pytest.mark.parametrize(
    ("op", "factor", "want"),
    [("leaky_relu", 0.01, F.leaky_relu), ("elu", 0.5, lambda x: F.elu(x, 0.5)),
     ("softcap", 30.0, lambda x: 30.0 * torch.tanh(x / 30.0))],
)  # fmt: skip
def test_activations_with_a_factor(op, factor, want):
    node = build(op, operand("a", F32, "N"), operand("b", F32))
    assert same(one(node, a=SPECIAL, b=factor), want(SPECIAL))


def test_clamp_and_where():
    a, lo, hi = (operand(n, F32, *axes) for n, axes in (("a", "N"), ("lo", ""), ("hi", "")))
    assert same(one(build("clamp", a, lo, hi), a=SPECIAL, lo=-1.0, hi=2.0), SPECIAL.clamp(-1, 2))
    positive = build("gt", a, lo)
    assert same(one(build("where", positive, a, hi), a=SPECIAL, lo=0.0, hi=7.0), torch.where(SPECIAL > 0, SPECIAL, 7.0))


@pytest.mark.parametrize("dtype", [d for d in TABLE.values() if d.kind == "float" and d.bits < 32], ids=str)
def test_cast_rounds_like_torch(dtype):
    x = torch.cat([SPECIAL, torch.randn(1000) * 100])
    want = x.to(getattr(torch, dtype.torch))
    if dtype is F8E4M3:  # no infinity; some versions of torch saturate instead
        want = torch.where(x.abs() > 464, math.nan, x).to(want.dtype)
    got = one(build("cast", operand("a", F32, "N"), dtype=dtype, saturate=False), a=x)
    assert same(got.float(), want.float())
    assert got.dtype == want.dtype


def test_cast_saturates_and_keeps_nan():
    x = torch.tensor([500.0, -math.inf, 448.0, math.nan])
    got = one(build("cast", operand("a", F32, "N"), dtype=TABLE["f8e4m3"], saturate=True), a=x).float()
    assert got[:3].tolist() == [448.0, -448.0, 448.0]
    assert got[3].isnan()


def test_cast_to_integers_rounds_to_even_and_saturates():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 127.6, -1000.0])
    assert one(build("cast", operand("a", F32, "N"), dtype=TABLE["s8"], saturate=True), a=x).tolist() == [
        0, 2, 2, 0, 127, -128,
    ]  # fmt: skip


def test_a_bool_counts_as_zero_or_one():
    flag = operand("f", BOOL, "N")
    f = torch.tensor([True, False, True])
    assert one(build("add", flag, flag), f=f).tolist() == [2.0, 0.0, 2.0]
    assert one(build("reduce_sum", flag, axes=("N",)), f=f).item() == 2.0


def test_large_integers_compare_exactly():
    label = operand("l", I64, "M")
    other = build("const", value=2**53, dtype=I64)
    assert one(build("eq", label, other), l=torch.tensor([2**53, 2**53 + 1])).tolist() == [True, False]


REDUCTIONS = {
    "sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin, "logsumexp": torch.logsumexp,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(REDUCTIONS))
@pytest.mark.parametrize("size", [1, 7, 257])
def test_reductions(kind, size):
    x = torch.randn(3, size) - 10  # all negative: a padded zero would show in max
    node = build(f"reduce_{kind}", operand("x", F32, "M", "N"), axes=("N",))
    assert same(one(node, x=x), REDUCTIONS[kind](x, 1))
    x[1, size // 2] = math.nan
    x[2, 0] = math.inf
    assert same(one(node, x=x), REDUCTIONS[kind](x, 1))


@pytest.mark.parametrize(
    ("kind", "want"), [("sum", 0.0), ("max", -math.inf), ("min", math.inf), ("logsumexp", -math.inf)]
)
def test_reductions_over_nothing(kind, want):
    node = build(f"reduce_{kind}", operand("x", F32, "M", "N"), axes=("M",))
    assert one(node, x=torch.empty(0, 3)).tolist() == [want] * 3


def test_mean_over_nothing_is_nan_as_in_torch():
    node = build("reduce_mean", operand("x", F32, "M", "N"), axes=("M",))
    assert one(node, x=torch.empty(0, 2)).isnan().all()


def test_pick_outside_the_axis_is_zero():
    node = build("pick", operand("z", F32, "M", "V"), operand("l", I64, "M"), axis="V")
    z = torch.randn(4, 3)
    got = one(node, z=z, l=torch.tensor([2, -100, 3, 0]))
    assert got.tolist() == [z[0, 2].item(), 0.0, 0.0, z[3, 0].item()]


def test_gather_and_its_error():
    node = build("gather", operand("t", F32, "P", "f"), operand("pos", I32, "M"), axis="P")
    table = torch.randn(5, 2)
    assert same(one(node, t=table, pos=torch.tensor([4, 0, 4], dtype=torch.int32)), table[[4, 0, 4]])
    assert one(node, t=table, pos=torch.empty(0, dtype=torch.int32)).shape == (0, 2)
    with pytest.raises(CodaError, match=r"lies outside 0\.\.4"):
        one(node, t=table, pos=torch.tensor([5], dtype=torch.int32))


def test_stack_slice_concat_part():
    a, b = operand("a", F32, "M", "d"), operand("b", F32, "M", "d")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    stacked = build("stack", a, b, axis=Axis.of("s", 2))
    assert same(one(stacked, a=x, b=y), torch.stack([x, y], -1))
    assert same(one(build("slice", stacked, axis="s", index=1), a=x, b=y), y)
    both = build("concat", a, b, parts=("d", "d"), axis=Axis.of("e", 2 * Axis.free("d").size))
    assert same(one(both, a=x, b=y), torch.cat([x, y], 1))
    half = Axis.of("f", Axis.free("d").size / 2)
    tail = build("part", a, axis="d", start=half.size, into=half)
    assert same(one(tail, a=x), x[:, 2:])


def test_concat_broadcasts_a_part_over_the_axes_it_lacks():
    a, b = operand("a", F32, "M", "d"), operand("b", F32, "f")
    both = build("concat", a, b, parts=("d", "f"), axis=Axis.of("e", Axis.free("d").size + Axis.free("f").size))
    x, y = torch.randn(3, 4), torch.randn(2)
    assert same(one(both, a=x, b=y), torch.cat([x, y.expand(3, 2)], 1))


def test_index_is_the_position():
    node = build("mul", build("index", axis=Axis.free("N")), operand("a", I64, "N"))
    assert one(node, a=torch.ones(4).long()).tolist() == [0, 1, 2, 3]


# Philox.

KNOWN_ANSWERS = [  # Random123 (Salmon et al. 2011), kat_vectors, philox4x32 with 10 rounds: counter, key, result
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, want):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(key))
    assert words.tolist() == want


def test_uniform_is_a_function_of_the_global_index():
    whole = uniform(7, 3, [6, 10])
    assert torch.equal(uniform(7, 3, [60]).reshape(6, 10), whole)
    assert torch.equal(uniform(7, 3, [4, 10]), whole[:4])  # more rows change nothing
    assert not torch.equal(uniform(8, 3, [6, 10]), whole)
    assert not torch.equal(uniform(7, 4, [6, 10]), whole)
    assert bool(((whole >= 0) & (whole < 1)).all())
    assert uniform(-1, -1, [0, 5]).shape == (0, 5)


def test_uniform_follows_the_documented_mapping():
    words = philox4x32(tuple(torch.tensor(c) for c in (1, 0, 9, 2)), (5, 3))
    got = uniform((3 << 32) | 5, (2 << 32) | 9, [8])
    assert got[4:].tolist() == [(w >> 8) * 2.0**-24 for w in words.tolist()]


# Programs.


@pytest.mark.parametrize("m", [0, 1, 5, 129])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_bias_gelu_over_ragged_sizes(m, n):
    x, w, bias = bf16(m, 10), bf16(n, 10), bf16(n)
    got = evaluate(program(BIAS_GELU), {"x": x, "w": w, "bias": bias})
    (y,) = got.values()
    assert same(y, F.gelu(x.float() @ w.float().T + bias.float(), approximate="tanh").bfloat16())
    assert y.is_contiguous()


def test_empty_contraction_gives_the_bias():
    x, w, bias = bf16(3, 0), bf16(4, 0), bf16(4)
    (y,) = evaluate(program(BIAS_GELU), {"x": x, "w": w, "bias": bias}).values()
    assert same(y, F.gelu(bias.float().expand(3, 4), approximate="tanh").bfloat16())


def test_exact_mode_rounds_nothing():
    o, w, x = bf16(5, 16), bf16(7, 16), bf16(5, 7)
    got = evaluate(program(RESIDUAL_STATS), {"o": o, "w": w, "x": x}, exact=True)
    h = x.double() + o.double() @ w.double().T
    torch.testing.assert_close(got["h"], h, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got["s"], (h * h).sum(1), rtol=1e-14, atol=1e-14)


def test_float64_arithmetic_keeps_the_roundings():
    o, w, x = bf16(5, 16), bf16(7, 16), bf16(5, 7)
    got = evaluate(program(RESIDUAL_STATS), {"o": o, "w": w, "x": x}, arithmetic=torch.float64)
    h = (x.double() + o.double() @ w.double().T).bfloat16()
    assert same(got["h"], h)
    assert same(got["s"], (h.double() ** 2).sum(1).float())


def test_operands_keep_their_values_and_may_have_any_strides():
    base = bf16(10, 32)
    o, w, x = base[:5, ::2], bf16(16, 7).T, bf16(1, 7).expand(5, 7)
    before = [t.clone() for t in (o, w, x)]
    got = evaluate(program(RESIDUAL_STATS), {"o": o, "w": w, "x": x})
    again = evaluate(program(RESIDUAL_STATS), dict(zip("owx", before, strict=True)))
    assert all(same(got[name], again[name]) for name in got)
    assert all(torch.equal(a, b) for a, b in zip((o, w, x), before, strict=True))


def test_accumulation_returns_a_new_tensor():
    p = program("""
        program wgrad(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K]) {
            dw += dy.T @ x
        }""")
    dy, x, dw = bf16(5, 3), bf16(5, 4), torch.randn(3, 4)
    before = dw.clone()
    (got,) = evaluate(p, {"dy": dy, "x": x, "dw": dw}).values()
    assert same(got, before + dy.float().T @ x.float())
    assert torch.equal(dw, before)


def test_scalars_as_numbers_tensors_and_defaults():
    p = program("program s(x: f32[M], a: f32, b: f32 = 2.0) { return x * a + b: f32 }")
    x = torch.randn(4)
    for a in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        (y,) = evaluate(p, {"x": x, "a": a}).values()
        assert same(y, x * 0.1 + 2)
    (y,) = evaluate(p, {"x": x, "a": 0.1, "b": 3}).values()
    assert same(y, x * 0.1 + 3)


def test_memory_order_of_an_output():
    p = program("""
        program heads(h: bf16[(B T), D], w: bf16[(H d=4), D]) {
            return h @ w.T: bf16[B, H, T, d]
        }""")
    h, w = bf16(2, 3, 8), bf16(8, 8)
    (y,) = evaluate(p, {"h": h, "w": w}).values()
    want = (h.float().reshape(6, 8) @ w.float().T).bfloat16().reshape(2, 3, 2, 4).permute(0, 2, 1, 3)
    assert same(y, want)
    assert y.is_contiguous()


def test_a_partial_result_is_one_that_is_finished():
    p = program("""
        program p(x: bf16[M, K], w: bf16[N, K]) {
            y = x @ w.T
            return y: bf16, s = partial(sum(y * y, N)): f32
        }""")
    x, w = bf16(5, 8), bf16(3, 8)
    assert same(evaluate(p, {"x": x, "w": w})["s"], ((x.float() @ w.float().T) ** 2).sum(1)[None])


def test_dtype_of_outputs_is_the_declared_one():
    got = evaluate(program(RESIDUAL_STATS), {"o": bf16(2, 3), "w": bf16(4, 3), "x": bf16(2, 4)})
    assert {n: t.dtype for n, t in got.items()} == {"h": torch.bfloat16, "s": torch.float32}
    assert BF16.torch == "bfloat16"
