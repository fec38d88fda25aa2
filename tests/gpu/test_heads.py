"""Head-wise epilogues on the GPU: QK-norm, RoPE (whole and partial), split outputs, head counts, head sizes."""

from __future__ import annotations

import pytest
import torch

import coda
from coda.runtime.compare import compare
from coda.runtime.inputs import poisoned_outputs, random_inputs
from coda.target import TILES, lower, parse_tile
from coda.target.legality import legal_tile
from tests.gpu.support import warm_or_skip
from tests.support import same_bits

QK_NORM = """
program qk_norm(h: bf16[(B T), D], r: f32[(B T)], w: bf16[(G d={d}), D], qg: f32[d]?, kg: bf16[d]?, pos: {pos}[(B T)],
                cos: {table}[P, f={f}], sin: {table}[P, f], bias: bf16[(G d)]?, const HQ, const HK, eps: f32 = 1e-6) {{
    dim G = HQ + 2*HK
    z = r * (h @ w.T) + bias
    q, k, v = split(z, G = HQ | HK | HK)
    q = q * rsqrt(mean(q*q, d) + eps) * qg
    k = k * rsqrt(mean(k*k, d) + eps) * kg
    return q = rope_half(q, cos[pos], sin[pos]): bf16[{order_q}],
           k = rope_half(k, cos[pos], sin[pos]): bf16[{order_k}], v: bf16[{order_k}]
}}
"""
BHTD = ("B, HQ, T, d", "B, HK, T, d")
BTHD = ("B, T, HQ, d", "B, T, HK, d")
FLAT = ("(B T), (HQ d)", "(B T), (HK d)")
CASES = (  # d, f, heads of q, of k, order, dtypes of positions and tables, tile
    (128, 64, 4, 2, BHTD, "i32", "f32", "128x128"),
    (128, 64, 8, 1, BTHD, "i64", "bf16", "128x256_coop"),
    (128, 64, 5, 2, BHTD, "i32", "f32", "192x128"),
    (64, 32, 5, 1, FLAT, "i32", "f32", "128x128"),
    (64, 16, 4, 2, BHTD, "i32", "f32", "128x128"),
    (64, 32, 4, 2, BTHD, "i32", "f32", "128x192"),
    (96, 48, 3, 3, BTHD, "i32", "f32", "128x192"),
    (256, 128, 2, 1, BHTD, "i32", "f32", "128x256_coop"),
)


@pytest.mark.parametrize("optional", [True, False], ids=("all", "bare"))
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"d{c[0]}-f{c[1]}-{c[2]}q{c[3]}k-{c[7]}")
def test_qk_norm_rope_split(case, optional: bool) -> None:
    d, f, hq, hk, (order_q, order_k), pos, table, tile = case
    text = QK_NORM.format(d=d, f=f, pos=pos, table=table, order_q=order_q, order_k=order_k)
    program = coda.parse(text, HQ=hq, HK=hk).programs["qk_norm"]
    for seed, (b, t, k) in enumerate(((1, 1, 64), (3, 57, 136), (2, 300, 64))):
        sizes = {"B": b, "T": t, "D": k, "P": 500}
        call = coda.compile(program, tile=tile, fallback="strict", B=b, T=t)
        warm_or_skip(call)
        inputs = random_inputs(program, sizes, seed, "cuda", optional=optional)
        inputs["pos"] = torch.randint(0, 500, (b * t,), device="cuda").to(inputs["pos"].dtype)
        out = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, out, dims=sizes)
        assert result.ok, f"{case} {sizes}\n{result}"
        again = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=again)
        assert all(same_bits(out[name], again[name]) for name in out)


def test_a_position_outside_the_table_gives_nan_and_reads_nothing() -> None:
    text = QK_NORM.format(d=128, f=64, pos="i32", table="f32", order_q=BHTD[0], order_k=BHTD[1])
    program = coda.parse(text, HQ=2, HK=1).programs["qk_norm"]
    call = coda.compile(program, tile="128x128", fallback="strict", B=1, T=8)
    inputs = random_inputs(program, {"B": 1, "T": 8, "D": 64, "P": 16}, 0, "cuda")
    inputs["pos"] = torch.tensor([0, 1, 2, 99, -5, 3, 4, 15], device="cuda", dtype=torch.int32)
    q, _, v = call(**inputs)
    assert q[0, :, [3, 4]].isnan().all() and not q[0, :, [0, 1, 2, 5, 6, 7]].isnan().any()
    assert not v.isnan().any()


OF_TOKENS = """
program of_tokens(h: bf16[(B T), D], w: bf16[(H d=64), D], cos: f32[T, f=32], sin: bf16[T, f]) {
    return q = rope_half(h @ w.T, cos, sin): bf16[B, H, T, d]
}
"""


@pytest.mark.parametrize("tile", ["128x128", "128x192"])
def test_tables_of_tokens_need_no_positions(tile: str) -> None:
    program = coda.parse(OF_TOKENS).programs["of_tokens"]
    for b, t in ((1, 300), (3, 43)):
        sizes = {"B": b, "T": t, "D": 72, "H": 3}
        call = coda.compile(program, tile=tile, fallback="strict", B=b, T=t)
        warm_or_skip(call)
        inputs, out = random_inputs(program, sizes, b, "cuda"), poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, out, dims=sizes)
        assert result.ok, f"{tile} {sizes}\n{result}"


JOINED = """
program joined(h: bf16[M, D], r: f32[M], wq: bf16[(HQ d=64), D], wk: bf16[(HK d), D], wv: bf16[(HK d), D], qg: f32[d],
               const HQ, const HK, eps: f32 = 1e-6) {
    q = r * (h @ wq.T)
    return q = q * rsqrt(mean(q*q, d) + eps) * qg: bf16[M, HQ, d], k = h @ wk.T: bf16[HK, M, d],
           v = relu(h @ wv.T): bf16[M, (HK d)]
}
"""


@pytest.mark.parametrize("tile", ["128x128", "128x192", "128x256_coop"])
def test_three_weights_in_one_kernel(tile: str) -> None:
    heads = {"128x128": (6, 2), "128x192": (6, 3), "128x256_coop": (8, 4)}[tile]
    program = coda.parse(JOINED, HQ=heads[0], HK=heads[1]).programs["joined"]
    call = coda.compile(program, tile=tile, fallback="strict")
    warm_or_skip(call)
    for seed, (m, k) in enumerate(((1, 64), (130, 72), (700, 512))):
        sizes = {"M": m, "D": k}
        inputs = random_inputs(program, sizes, seed, "cuda")
        out = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, out)
        assert result.ok, f"{tile} {sizes}\n{result}"


STRIPS = """
program strips(h: bf16[(B T), D], wq: bf16[(HQ d={d}), D], wk: bf16[(HK d), D], wv: bf16[(HK d), D], r: f32[(B T)],
               pos: i32[(B T)], cos: f32[P, f={f}], sin: f32[P, f], const HQ, const HK) {{
    return q = rope_half(r * (h @ wq.T), cos[pos], sin[pos]): bf16[B, HQ, T, d],
           k = rope_half(r * (h @ wk.T), cos[pos], sin[pos]): f32[B, T, HK, d], v = h @ wv.T: f16[(B T), (HK d)]
}}
"""


@pytest.mark.parametrize("tile", [t.name for t in TILES])
@pytest.mark.parametrize(("d", "heads"), [(64, (5, 1)), (96, (3, 2)), (128, (4, 1)), (256, (2, 1))])
def test_tiles_hold_strips_of_heads_of_several_weights(d: int, heads: tuple[int, int], tile: str) -> None:
    program = coda.parse(STRIPS.format(d=d, f=d // 2), HQ=heads[0], HK=heads[1]).programs["strips"]
    if not legal_tile(parse_tile(tile), lower(program)):
        pytest.skip("no whole strips")
    for seed, (b, t, k) in enumerate(((1, 1, 64), (3, 57, 136), (2, 300, 512))):
        sizes = {"B": b, "T": t, "D": k, "P": 500}
        call = coda.compile(program, tile=tile, fallback="strict", B=b, T=t)
        warm_or_skip(call)
        inputs = random_inputs(program, sizes, seed, "cuda")
        outputs = []
        for _ in range(2):
            outputs.append(poisoned_outputs(program, sizes, "cuda"))
            call(**inputs, out=outputs[-1])
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, outputs[0], dims=sizes)
        assert result.ok, f"{d} {tile} {sizes}\n{result}"
        assert all(same_bits(outputs[0][name], outputs[1][name]) for name in outputs[0])


THIRDS = """
program thirds(x: bf16[(B T), D], w: bf16[{order}], bias: bf16[(s H d)]?, const H) {{
    z = x @ w{turned} + bias
    return q = z.s[0]: bf16[B, H, T, d], k = gelu_tanh(z.s[1]): bf16[B, T, H, d], v = z.s[2]: f32[(B T), (H d)]
}}
"""


@pytest.mark.parametrize("order", ["D, (s=3 H d=64)", "(s=3 H d=64), D", "D, (s=3 H d=96)"])
@pytest.mark.parametrize("heads", [1, 12])
def test_thirds_of_one_weight_as_gpt2_has_them(order: str, heads: int) -> None:
    text = THIRDS.format(order=order, turned=".T" if order.startswith("(") else "")
    program = coda.parse(text, H=heads).programs["thirds"]
    for seed, (b, t, k) in enumerate(((1, 1, 64), (3, 57, 136), (2, 300, 768))):
        sizes = {"B": b, "T": t, "D": k}
        call = coda.compile(program, fallback="strict", **sizes)
        inputs = random_inputs(program, sizes, seed, "cuda", optional=seed != 1)
        out = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, out, dims=sizes)
        assert result.ok, f"{order} {sizes}\n{result}"


def test_columns_in_three_lanes_are_cut_into_runs() -> None:
    text = "program p(x: bf16[M, D], w: bf16[(s=3 N), D], bias: bf16[(s N)]) { z = x @ w.T + bias\n" \
           "return q = z.s[0]: bf16, k = z.s[1]: bf16, v = relu(z.s[2]): bf16 }"  # fmt: skip
    program = coda.parse(text).programs["p"]
    for n in (64, 80, 768):
        sizes = {"M": 130, "D": 128, "N": n}
        call = coda.compile(program, fallback="strict", **sizes)
        inputs = random_inputs(program, sizes, 1, "cuda")
        out = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        result = compare(program, inputs, out, dims=sizes)
        assert result.ok, f"{sizes}\n{result}"


PAIRS = """
program pairs(h: bf16[(B T), D], w: bf16[(G f={f} p=2), D], g: f32[(f p)]?, pos: i32[(B T)], cos: {table}[P, f],
              sin: {table}[P, f], bias: bf16[(G f p)]?, const HQ, const HK, eps: f32 = 1e-6) {{
    dim G = HQ + 2*HK
    q, k, v = split(h @ w.T + bias, G = HQ | HK | HK)
    q = q * rsqrt(mean(q*q, (f p)) + eps) * g
    return q = rope_interleaved(q, cos[pos], sin[pos]): bf16[B, HQ, T, (f p)],
           k = rope_interleaved(k, cos[pos], sin[pos]): f32[B, T, HK, (f p)], v: f16[(B T), (HK f p)]
}}
"""


@pytest.mark.parametrize(
    "case", [(64, (4, 2), "f32", "128x128"), (32, (5, 1), "bf16", "128x192"), (48, (3, 3), "f32", "128x192")]
)
def test_interleaved_pairs(case: tuple[int, tuple[int, int], str, str]) -> None:
    f, heads, table, tile = case
    program = coda.parse(PAIRS.format(f=f, table=table), HQ=heads[0], HK=heads[1]).programs["pairs"]
    for seed, (b, t, k) in enumerate(((1, 1, 64), (3, 57, 136), (2, 300, 64))):
        sizes = {"B": b, "T": t, "D": k, "P": 500}
        call = coda.compile(program, tile=tile, fallback="strict", B=b, T=t)
        warm_or_skip(call)
        inputs = random_inputs(program, sizes, seed, "cuda", optional=seed != 1)
        out = poisoned_outputs(program, sizes, "cuda")
        call(**inputs, out=out)
        assert call.last_route.kind == "kernel"
        result = compare(program, inputs, out, dims=sizes)
        assert result.ok, f"{sizes}\n{result}"


VALUES = """
program values(h: bf16[(B T), D], w: bf16[(G d=64), D], seed: i64[], offset: i64[]) {
    z = h @ w.T
    return y = z * rand(seed, offset, [B, T, G, d]): f32[B, G, T, d], lse = logsumexp(z, d): f32[B, G, T],
           top = max(z, d) * index(G) + index(T): f32[B, G, T]
}
"""


@pytest.mark.parametrize("tile", ["128x128", "128x192"])
def test_positions_and_log_sums_of_heads(tile: str) -> None:
    call = coda.compile(VALUES, tile=tile, fallback="strict")
    warm_or_skip(call)
    for b, t, g, k in ((1, 1, 2, 64), (3, 57, 5, 136), (2, 300, 6, 64)):
        sizes = {"B": b, "T": t, "G": g, "D": k}
        inputs = random_inputs(call.program, sizes, b, "cuda")
        out = poisoned_outputs(call.program, sizes, "cuda")
        call(**inputs | {"h": inputs["h"].view(b, t, k)}, out=out)
        assert call.last_route.kind == "kernel", call.last_route
        result = compare(call.program, inputs, out, dims=sizes)
        assert result.ok, f"{tile} {sizes}\n{result}"
