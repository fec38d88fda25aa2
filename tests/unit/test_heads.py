"""Head-wise lowering: what becomes heads, and which sizes are numbers. The kernels run in tests/gpu/test_heads.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from coda.errors import CodaError
from coda.frontend import load_path
from coda.ir import Program
from coda.passes.lane_heads import lanes_as_heads
from coda.passes.numbers import with_head_sizes
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target import TILES
from coda.target.blocks import lower_noting
from coda.target.emit_heads import HeadEmitter
from coda.target.legality import legal_tile
from coda.target.lower import lower
from tests.headmath import HostHeads, compile_heads
from tests.programs import EXAMPLES
from tests.support import LAYOUTS, laid_out, program

THIRDS = """program thirds(x: bf16[(B T), D], w: bf16[D, (s=3 H=2 d=16)], bias: bf16[(s H d)]?) {
    z = x @ w + bias
    return q = z.s[0]: bf16[B, H, T, d], k = gelu_tanh(z.s[1]): bf16[B, T, H, d], v = z.s[2]: f32[(B T), (H d)]
}"""
COLUMNS = """program columns(x: bf16[M, D], w: bf16[(s=3 N=96), D], bias: bf16[(s N)]) {
    z = x @ w.T + bias
    return q = z.s[0]: bf16, k = z.s[1]: bf16, v = relu(z.s[2]): bf16
}"""
APART = (
    "program two(x: bf16[M, D], w: bf16[(s=2 H=2 d=16), D]) { z = x @ w.T; return k = z.s[0]: bf16, v = z.s[1]: bf16 }"
)
MIXED = "program two(x: bf16[M, D], w: bf16[(s=2 H=2 d=16), D]) { z = x @ w.T; return silu(z.s[0]) * z.s[1]: bf16 }"


@pytest.mark.parametrize("text", [THIRDS, COLUMNS, APART])
def test_lanes_are_heads_side_by_side(text: str) -> None:
    """Each lane is a segment, and the program means what it meant."""
    p = program(text)
    plan = lower(p)
    assert plan.heads is not None
    each = plan.heads.segments[1].start
    assert [s.start for s in plan.heads.segments] == [i * each for i in range(len(p.outputs))]
    inputs = random_inputs(p, {"B": 2, "T": 3, "M": 5, "D": 8})
    sizes = {"B": 2, "T": 3, "D": 8} if "T" in {a.name for a in p.axes} else {"M": 5, "D": 8}
    want, got = (evaluate(x, inputs, dims=sizes) for x in (p, lanes_as_heads(p)))
    for name in want:
        assert (want[name].reshape(-1) == got[name].reshape(-1)).all()


def test_lanes_that_meet_stay_lanes() -> None:
    assert lower(program(MIXED)).heads is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (COLUMNS.replace("N=96", "N"), "give --dims N=768"),
        (COLUMNS.replace("N=96", "N=72"), "a multiple of 16 columns"),
        (THIRDS.replace("H=2", "H"), "declare it, as in H=64, or give --dims"),
    ],
)
def test_lanes_that_cannot_be_heads_say_why(text: str, why: str) -> None:
    with pytest.raises(CodaError, match=why):
        lower(program(text))


def block(name: str) -> Program:
    consts = {"HQ": 4, "HK": 2} if name == "phi3_qkv" else {}
    return load_path(EXAMPLES / f"{name.removesuffix('_qkv')}_block.coda", consts).programs[name]


@pytest.mark.parametrize("name", ["llama3_qkv", "phi3_qkv", "qwen3_qkv", "gpt2_qkv"])
def test_sizes_of_heads_that_are_given_make_one_product(name: str) -> None:
    """All else stays symbolic: one artifact for every number of rows, and of features."""
    sizes = {"HQ": 4, "HK": 2, "H": 4, "d": 64, "f": 32, "D": 256, "B": 2, "T": 64}
    lowered = lower_noting(block(name), sizes=sizes)
    assert [step.kind for step in lowered.schedule.steps] == ["row", "gemm"]
    (gemm,) = lowered.schedule.gemms
    assert gemm.heads is not None and len(gemm.heads.segments) == 3
    assert {"B", "T", "D"} <= {a.name for a in lowered.schedule.program.free_axes}


def test_only_heads_become_numbers() -> None:
    p = program("program p(x: bf16[M, K], w: bf16[(s=2 F), K]) { z = x @ w.T; return silu(z.s[0]) * z.s[1]: bf16 }")
    assert with_head_sizes(p, {"M": 8, "K": 8, "F": 8}) is p


# -- the generated code, on the host ---------------------------------------------------------------------------------

PARTIAL = """program partial_rope(h: bf16[(B T), D], w: bf16[(G d=48), D], g: f32[d]?, s: f32[(G d)]?, pos: i64[(B T)],
                cos: bf16[P, f=16], sin: bf16[P, f], const HQ = 3, const HK = 2, eps: f32 = 1e-6) {
    dim G = HQ + HK
    q, k = split(h @ w.T * s, G = HQ | HK)
    q = q * rsqrt(mean(q*q, d) + eps) * g
    return q = rope_half(q, cos[pos], sin[pos]): f32[B, HQ, T, d], k: f16[(B T), (HK d)],
           rk = rsqrt(mean(k*k, d) + eps): f32[(B T), HK], top = max(k, d): bf16[B, HK, T]
}"""
PAIRS = """program pairs(h: bf16[(B T), D], w: bf16[(G f=24 p=2), D], g: f32[(f p)]?, s: bf16[f], pos: i32[(B T)],
              cos: f32[P, f], sin: f32[P, f], bias: bf16[(G f p)]?, const HQ = 3, const HK = 2, eps: f32 = 1e-6) {
    dim G = HQ + 2*HK
    q, k, v = split(h @ w.T + bias, G = HQ | HK | HK)
    q = q * rsqrt(mean(q*q, (f p)) + eps) * g
    return q = rope_interleaved(q, cos[pos], sin[pos]): bf16[B, HQ, T, (f p)], k = s * k: f32[B, T, HK, (f p)],
           v: f16[(B T), (HK f p)], top = max(k, (f p)): f32[(B T), HK]
}"""
ROTATED = """program rotated(h: bf16[(B T), D], w: bf16[(H f=24 p=2), D], pos: i32[(B T)], cos: f32[P, c=16],
                sin: f32[P, c]) {
    a, b = split(h @ w.T, f = c | *)
    return q = concat(rope_interleaved(a, cos[pos], sin[pos]), b, f): bf16[B, H, T, (f p)]
}"""
DROPPED = """program dropped(h: bf16[(B T), D], w: bf16[(G d=48), D], pos: i64[(B T)], cos: bf16[P, f=16],
                sin: bf16[P, f], seed: i64[], offset: i64[], const HQ = 3, const HK = 2) {
    dim G = HQ + HK
    q, k = split(h @ w.T, G = HQ | HK)
    return q = where(rand(seed, offset, [B, HQ, T, d]) >= 0.5, rope_half(q, cos[pos], sin[pos]), 0): f32[B, HQ, T, d],
           k = k * (index(d) + 1) + index(HK) * index(B) - index(T): f32[(B T), (HK d)],
           top = max(k, d) * rand(seed, offset, [HK, T, B]): f32[(B T), HK], lse = logsumexp(k, d): f32[B, HK, T]
}"""
DROPPED_PAIRS = """program dropped_pairs(h: bf16[(B T), D], w: bf16[(H f=24 p=2), D], seed: i64[], offset: i64[]) {
    z = (h @ w.T) * rand(seed, offset, [B, T, H, f, p]) + index(f)
    return y = stack(z.p[0] - z.p[1], z.p[1], p): f32[B, H, T, (f p)]
}"""
DROPPED_ROWS = """program dropped_rows(h: bf16[(B T), D], w: bf16[(G d=32), D], seed: i64[], offset: i64[]) {
    z = h @ w.T
    return y = z * rsqrt(mean(z * z, d)) * rand(seed, offset, [B, T, G, d]): f32[(B T), (G d)]
}"""
FINISHED = """program finished(h: bf16[(B T), D], stats: partial[sum, D] f32[(B T)], w: bf16[(H d=64), D],
                eps: f32 = 1e-6) {
    return q = rsqrt(finish(stats) / size(D) + eps) * (h @ w.T): bf16[B, H, T, d]
}"""
STRIPS = """program strips(h: bf16[(B T), D], wq: bf16[(HQ d=96), D], wk: bf16[(HK d), D], wv: bf16[(HK d), D],
               pos: i32[(B T)], cos: f32[P, f=48], sin: f32[P, f], r: f32[(B T)], const HQ = 3, const HK = 2) {
    return q = rope_half(r * (h @ wq.T), cos[pos], sin[pos]): bf16[B, HQ, T, d],
           k = rope_half(r * (h @ wk.T), cos[pos], sin[pos]): f32[(B T), (HK d)], v = silu(h @ wv.T): f16[B, T, HK, d]
}"""
OF_ROWS = """program of_rows(h: bf16[M, D], w: bf16[(G d=48), D], cos: f32[M, f=16], sin: bf16[M, f], y: bf16[M, d],
                r: f32[M], const HQ = 3, const HK = 2) {
    dim G = HQ + HK
    q, k = split(r * (h @ w.T), G = HQ | HK)
    return q = rope_half(q, cos, sin): f32[M, HQ, d], k = k + y: bf16[M, HK, d]
}"""
OF_TOKENS = """program of_tokens(h: bf16[(B T), D], w: bf16[(H f=24 p=2), D], cos: f32[T, f], sin: f32[T, f]) {
    return q = rope_interleaved(h @ w.T, cos, sin): bf16[B, H, T, (f p)]
}"""
MADE = {
    text.split()[1].split("(")[0]: text
    for text in (
        THIRDS,
        COLUMNS,
        PARTIAL,
        PAIRS,
        ROTATED,
        DROPPED,
        DROPPED_PAIRS,
        DROPPED_ROWS,
        FINISHED,
        STRIPS,
        OF_ROWS,
        OF_TOKENS,
    )
}
SIZES = {"G": 3, "B": 2, "T": 9, "P": 7, "D": 16, "M": 19, "H": 2}


def programs() -> dict[str, Program]:
    """The head-wise examples with few heads, and programs that use the rest of what is known about heads."""
    few, names = {"HQ": 2, "HK": 1}, ("qkv_rope", "qkv_rope_interleaved", "qk_norm", "qkv_weights")
    found = {name: load_path(EXAMPLES / f"{name}.coda", few).programs[name] for name in names}
    return found | {name: program(text) for name, text in MADE.items()}


PROGRAMS = programs()
LOWERED = {name: lower(p) for name, p in PROGRAMS.items()}


@pytest.mark.parametrize(
    ("name", "strip"),
    [("qkv_rope", (32, 2)), ("strips", (16, 2)), ("of_tokens", (16, 1)), ("qk_norm", None), ("partial_rope", None),
     ("dropped_pairs", None), ("of_rows", None)],
)  # fmt: skip
def test_heads_are_cut_into_strips_where_nothing_needs_them_whole(name: str, strip: tuple[int, int] | None) -> None:
    """So that tiles of 192 columns take heads of 128, and lie across the weights of q, k and v."""
    plan = LOWERED[name]
    assert plan.heads is not None
    assert (plan.heads.strip and (plan.heads.strip.run, plan.heads.strip.parts)) == strip
    whole = {t.name for t in TILES if t.n % plan.heads.dim == 0}
    taken = {t.name for t in TILES if legal_tile(t, plan)}
    assert taken == (whole if strip is None else {t.name for t in TILES if t.n % (2 * strip[0]) == 0})


@pytest.fixture(scope="module")
def compiled() -> dict[str, HostHeads]:
    return dict(zip(PROGRAMS, compile_heads(list(LOWERED.values())), strict=True))


@pytest.mark.parametrize("optional", [True, False], ids=["all", "bare"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_generated_code_agrees_with_the_interpreter(name: str, optional: bool, compiled: dict[str, HostHeads]) -> None:
    """Also a band of rows that is not full, and rows in batches."""
    p = PROGRAMS[name]
    sizes = {a.name: SIZES[a.name] for a in p.free_axes}
    inputs = random_inputs(p, sizes, 1, "cpu", optional=optional)
    want, got = evaluate(p, inputs, dims=sizes), compiled[name](inputs, sizes)
    for output in want:
        rtol = 2e-5 if want[output].dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got[output], want[output], rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_operands_lie_anywhere(name: str, layout: str, compiled: dict[str, HostHeads]) -> None:
    """A3, A5: vectors at any stride and offset; tables, whose rows are read in pairs, where their rows are rows."""
    p = PROGRAMS[name]
    sizes = {a.name: SIZES[a.name] for a in p.free_axes}
    tables = {o.arg for o in compiled[name].plan.operands if o.gathered}
    inputs = {
        key: laid_out(x, layout) if isinstance(x, Tensor) and (key not in tables or layout != "transposed") else x
        for key, x in random_inputs(p, sizes, 1, "cpu").items()
    }
    want, got = evaluate(p, inputs, dims=sizes), compiled[name](inputs, sizes)
    for output in want:
        rtol = 2e-5 if want[output].dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got[output], want[output], rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PAIRS.replace("B, HQ, T, (f p)", "B, HQ, T, (p f)"), "'p' last in its group"),
        (PAIRS.replace("k = s * k: f32[B, T, HK, (f p)]", "k = k.p[0]: f32[B, T, HK, f]"), "with two lanes"),
        (PAIRS.replace("f=24", "f=12"), "multiples of 16"),
    ],
)
def test_pairs_that_are_none_say_why(text: str, why: str) -> None:
    with pytest.raises(CodaError, match=why):
        lower(program(text))


@pytest.mark.parametrize(("name", "differ"), [("qkv_rope", ["output0"]), ("qk_norm", ["operand0", "output0"])])
def test_q_and_k_share_their_code(name: str, differ: list[str]) -> None:
    """It says by name where it reads and stores, so that neither is there twice."""
    plan = lower(PROGRAMS[name])
    _, _, (rotated, plain) = HeadEmitter(plan)._written
    assert [s.name for s in rotated.segments] == ["Segment0", "Segment1"]
    assert (rotated.members, plain.members) == (differ, [])


@pytest.mark.parametrize("name", ["qkv_rope", "qkv_rope_interleaved", "partial_rope"])
def test_a_position_outside_the_table_gives_nan(name: str, compiled: dict[str, HostHeads]) -> None:
    p = PROGRAMS[name]
    sizes = {a.name: SIZES[a.name] for a in p.free_axes}
    inputs = random_inputs(p, sizes, 1, "cpu")
    inputs["pos"][1:3] = torch.tensor([SIZES["P"], -1])
    q = compiled[name](inputs, sizes)["q"]
    turned = q if name != "partial_rope" else q[..., :32]  # the rest of a head is not rotated
    assert turned[0, :, 1:3].isnan().all()
    assert not turned[0, :, 3:].isnan().any() and not q[1].isnan().any()
