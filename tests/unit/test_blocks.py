"""The blocks of examples/: forward and derived backward against plain modules in float64, and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda.frontend import load_path
from coda.ir import Node, Program, substitute, topological
from coda.ops import build
from coda.passes import derive, fuse, optimize
from coda.passes.axes import arranged
from coda.passes.kernels import assemble, composed
from coda.passes.simplify import simplify
from coda.printer import print_program
from coda.runtime.binding import bind, shapes_of
from coda.runtime.blocks import evaluate_partition
from coda.runtime.compare import compare
from coda.runtime.gradients import random_seeds
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.chunks import lower_along
from tests.gradients import check_gradients, check_text

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"M": 5, "D": 16, "A": 8, "F": 12, "V": 10, "H": 3, "d": 4, "B": 2, "T": 3, "HQ": 4, "HK": 2, "P": 7, "f": 2}
DEFAULT = 1e-6


# The modules, as they are written in Hugging Face's transformers.


def rms(x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    return g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def gemma_rms(x: Tensor, g: Tensor) -> Tensor:
    return rms(x, 1.0 + g, 1e-6)


def layer_norm(x: Tensor, g: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g, b, eps)


def heads(x: Tensor, d: int) -> Tensor:
    """[B*T, H*d] as [B, H, T, d]."""
    return x.view(SIZES["B"], SIZES["T"], -1, d).transpose(1, 2)


def rope(x: Tensor, pos: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rotary_pos_emb with rotate_half; cos and sin are the tables of the first half."""
    cos, sin = (torch.cat((t, t), -1)[pos.long()].view(SIZES["B"], 1, SIZES["T"], -1) for t in (cos, sin))
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated * sin


def llama3_mlp(o, x, w_o, gamma, w_gate, w_up, w_down, eps):
    h = x + F.linear(o, w_o)
    n = rms(h, gamma)
    return [h + F.linear(F.silu(F.linear(n, w_gate)) * F.linear(n, w_up), w_down)]


def llama3_qkv(x, gamma, w_q, w_k, w_v, pos, cos, sin, eps):
    n = rms(x, gamma)
    q, k, v = (heads(F.linear(n, w), 4) for w in (w_q, w_k, w_v))
    return [rope(q, pos, cos, sin), rope(k, pos, cos, sin), v]


def llama3_layer(
    x, gamma_attention, w_q, w_k, w_v, w_o, gamma_mlp, w_gate, w_up, w_down, pos, cos, sin, eps
):  # fmt: skip
    q, k, v = llama3_qkv(x, gamma_attention, w_q, w_k, w_v, pos, cos, sin, eps)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return llama3_mlp(o.reshape(x.shape[0], -1), x, w_o, gamma_mlp, w_gate, w_up, w_down, eps)


def qwen3_qkv(x, gamma, w_q, w_k, w_v, g_q, g_k, pos, cos, sin, eps):
    n = rms(x, gamma, 1e-6)
    q, k, v = (heads(F.linear(n, w), 128) for w in (w_q, w_k, w_v))
    return [rope(rms(q, g_q, 1e-6), pos, cos, sin), rope(rms(k, g_k, 1e-6), pos, cos, sin), v]


def gemma2_mlp(o, x, w_o, g_attn, g_pre, g_post, w_gate, w_up, w_down, eps):
    h = x + gemma_rms(F.linear(o, w_o), g_attn)
    n = gemma_rms(h, g_pre)
    m = F.linear(F.gelu(F.linear(n, w_gate), approximate="tanh") * F.linear(n, w_up), w_down)
    return [h + gemma_rms(m, g_post)]


def gemma2_logits(x, gamma, w, cap, eps):
    return [torch.tanh(F.linear(gemma_rms(x, gamma), w) / cap) * cap]


def gpt2_qkv(x, g, b, w, bias, eps):
    thirds = (layer_norm(x, g, b) @ w + bias).split(SIZES["H"] * SIZES["d"], -1)
    return [heads(y, SIZES["d"]) for y in thirds]


def gpt2_mlp(o, x, w_o, b_o, g, b, w_in, b_in, w_out, b_out, eps):
    h = x + o @ w_o + b_o
    return [h + F.gelu(layer_norm(h, g, b) @ w_in + b_in, approximate="tanh") @ w_out + b_out]


def phi3_mlp(o, x, w_o, gamma, w_gate_up, w_down, eps):
    h = x + F.linear(o, w_o)
    gate, up = F.linear(rms(h, gamma), w_gate_up).chunk(2, -1)
    return [h + F.linear(up * F.silu(gate), w_down)]


def phi3_qkv(x, gamma, w, pos, cos, sin, eps):
    q, k, v = F.linear(rms(x, gamma), w).split([16, 8, 8], -1)
    q, k, v = (heads(y, 4) for y in (q, k, v))
    return [rope(q, pos, cos, sin), rope(k, pos, cos, sin), v]


def t5_ff(x, gamma, w_0, w_1, w_out, eps):
    n = rms(x, gamma, 1e-6)
    return [x + F.linear(F.gelu(F.linear(n, w_0), approximate="tanh") * F.linear(n, w_1), w_out)]


def vit_mlp(o, x, w_o, b_o, scale_1, g, b, w_1, b_1, w_2, b_2, scale_2, eps):
    h = x + scale_1 * F.linear(o, w_o, b_o)
    return [h + scale_2 * F.linear(F.gelu(F.linear(layer_norm(h, g, b, 1e-6), w_1, b_1)), w_2, b_2)]


MODULES: dict[str, Callable[..., list[Tensor]]] = {
    f.__name__: f
    for f in (llama3_mlp, llama3_qkv, llama3_layer, qwen3_qkv, gemma2_mlp, gemma2_logits, gpt2_qkv, gpt2_mlp, phi3_mlp,
              phi3_qkv, t5_ff, vit_mlp)
}  # fmt: skip


def block(name: str) -> Program:
    path = EXAMPLES / (f"{name}.coda" if name.endswith("_layer") else f"{name.split('_')[0]}_block.coda")
    sizes = {"phi3_qkv": ("HQ", "HK"), "llama3_layer": ("HQ", "HK", "f")}.get(name, ())
    consts = {n: SIZES[n] for n in sizes}
    return load_path(path, consts).programs[name]


def operands(p: Program) -> tuple[dict, dict[str, int]]:
    symbols = {s.name for a in p.axes for s in a.size.free_symbols}
    inputs = random_inputs(p, {n: SIZES[n] for n in symbols})
    return inputs, bind(p, shapes_of(inputs), {n: SIZES[n] for n in symbols})


@pytest.mark.parametrize("name", MODULES)
def test_forward_and_gradients_are_those_of_the_module(name):
    p = block(name)
    inputs, sizes = operands(p)
    backward = check_gradients(p, sizes, inputs=inputs)
    leaves = {n: x.double().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
              for n, x in inputs.items()}  # fmt: skip
    results = MODULES[name](**leaves)
    exact = evaluate(p, inputs, exact=True, dims=sizes)
    for want, got in zip(results, exact.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    seeds = random_seeds(p, backward.backward, sizes, 1)
    loss = sum((y * s.double()).sum() for y, s in zip(results, seeds.values(), strict=True))
    wanted = list(backward.gradients)
    want = dict(zip(wanted, torch.autograd.grad(loss, [leaves[n] for n in wanted]), strict=True))
    calls = {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}
    got = evaluate(backward.joined(), calls, exact=True, dims=sizes)
    for n, output in backward.gradients.items():
        torch.testing.assert_close(got[output], want[n], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODULES)
def test_the_fused_block_has_the_gradients_of_the_module(name):
    """After delay_norm and all else: the derivative of the rewritten program, itself rewritten."""
    p = block(name)
    inputs, sizes = operands(p)
    check_gradients(optimize(p)[0], sizes, inputs=inputs)
    b = fuse(p, None)
    plain, fused = (x.joined() for x in (check_gradients(p, sizes, inputs=inputs), b.gradients))
    calls = {**inputs, **{f"d_{n}": s for n, s in random_seeds(p, b.gradients.backward, sizes, 1).items()}}
    want, got = (evaluate(x, calls, exact=True, dims=sizes) for x in (plain, fused))
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODULES)
def test_kernels(name, golden):
    """Kernels are programs that keep the rules, make up the program again, and give its bits."""
    b = fuse(block(name), None)
    inputs, sizes = operands(b.program)
    forward = evaluate_partition(b.forward, inputs, dims=sizes)
    want = evaluate(b.forward.program, inputs, dims=sizes)
    assert all(torch.equal(forward[n], want[n]) for n in want)
    for side in (b.forward, b.backward):
        assert simplify(assemble(side)) == simplify(side.program)
        for kernel in side.kernels:
            check_text(kernel.program)
    kernels = [*b.forward.kernels, *b.backward.kernels]
    golden(f"partition/{name}.coda", "\n".join(print_program(k.program) for k in kernels))


@pytest.mark.parametrize("name", MODULES)
def test_the_backward_writes_nothing_that_the_forward_has_in_memory(name):
    b = fuse(block(name), None)
    made, _ = composed(b.forward.kernels, b.forward.program.params)
    written, _ = composed(b.backward.kernels, b.backward.program.params)
    kept = {build("input", name=n, type=made[n].type): arranged(made[n].value, made[n].type) for n in b.gradients.saved}
    new = substitute((o.value for o in written.values()), kept)
    real = numbered([*(o.value for o in made.values()), *new.values()])
    assert not {real[o.value] for o in made.values()} & {real[new[o.value]] for o in written.values()}


def numbered(values: list[Node]) -> dict[Node, int]:
    """A number for each value and all below them, the same for those that differ in roundings only."""
    keys: dict[object, int] = {}
    found: dict[Node, int] = {}
    for n in topological(values):
        key = (n.op, n.attrs, tuple(found[a] for a in n.args))
        found[n] = found[n.args[0]] if n.op == "cast" else keys.setdefault(key, len(keys))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_the_fused_forward_passes_the_error_gate(name):
    p = block(name)
    inputs, sizes = operands(p)
    comparison = compare(p, inputs, evaluate(optimize(p)[0], inputs, dims=sizes), dims=sizes)
    assert comparison.ok, comparison


KINDS = {  # kernels forward, backward
    "llama3_mlp": ("gemm finish gemm gemm", "gemm finish gemm finish gemm gemm gemm gemm"),
    "llama3_qkv": ("row gemm", "row gemm finish gemm"),
    "llama3_layer": (
        "row gemm call gemm finish gemm gemm",
        "gemm finish gemm finish gemm gemm gemm gemm call row gemm finish gemm",
    ),
    "qwen3_qkv": ("row gemm", None),
    "gemma2_mlp": ("gemm row gemm gemm row", None),
    "gpt2_mlp": ("gemm row gemm gemm", "gemm finish gemm finish row finish gemm gemm gemm gemm"),
}


@pytest.mark.parametrize("name", KINDS)
def test_launches(name):
    b = fuse(block(name), None)
    forward, backward = (" ".join(k.kind for k in side.kernels) for side in (b.forward, b.backward))
    want = KINDS[name]
    assert forward == want[0]
    assert want[1] in (None, backward)


@pytest.mark.parametrize("name", [n for n in MODULES if not n.endswith("_layer")])
def test_the_backward_is_lowered_whole(name):
    """Not even one kernel of it is left to the interpreter, and the arguments tell all sizes."""
    backward = derive(block(name))[0].backward
    schedule = lower_along(backward, None, sizes=SIZES).schedule
    assert {o.name for o in schedule.program.outputs} == set(derive(block(name))[0].gradients.values())


def autograd(name: str, inputs: dict, seeds: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The module's gradients in a dtype, as PyTorch computes them."""
    floats = {n for n, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    leaves = {n: x.to(dtype).requires_grad_() if n in floats else x for n, x in inputs.items()}
    results = MODULES[name](**leaves)
    loss = sum((y * s.to(dtype)).sum(dtype=torch.float64) for y, s in zip(results, seeds.values(), strict=True))
    return dict(zip(sorted(floats), torch.autograd.grad(loss, [leaves[n] for n in sorted(floats)]), strict=True))


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", MODULES)
def test_the_fused_backward_passes_the_error_gate(name):
    """Kernel by kernel with every rounding: at most twice the error of the module in bf16, as everywhere."""
    b = fuse(block(name), None)
    inputs, sizes = operands(b.program)
    seeds = random_seeds(b.program, b.gradients.backward, sizes, 1)
    kept = evaluate_partition(b.forward, inputs, dims=sizes)
    known = {**inputs, **kept, **{f"d_{n}": s for n, s in seeds.items()}}
    calls = {p.name: known[p.name] for p in b.backward.program.params if p.name in known}
    symbols = {s.name for a in b.backward.program.axes for s in a.size.free_symbols}
    got = evaluate_partition(b.backward, calls, dims={n: s for n, s in sizes.items() if n in symbols})
    exact, eager = (autograd(name, inputs, seeds, dtype) for dtype in (torch.float64, torch.bfloat16))
    for n, output in b.gradients.gradients.items():
        limit = 2 * relative(eager[n], exact[n]) + 2**-8
        assert relative(got[output], exact[n]) <= limit, n
