"""The blocks of examples/ against the layers of Hugging Face's transformers that they are named after, with random
weights: forward, and the derived backward for every parameter.

The layers are used as they are. Attention is cut out where transformers lets one choose it: ours notes q, k and v, and
returns an ``o`` that the test has chosen. So one run of a layer gives what is in front of attention and what is behind.

Twice: in float64 without rounding (transformers' norms compute in f32 whatever the dtype is, which bounds that
comparison), and kernel by kernel in bf16, where our error may be twice the layer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coda.frontend import load
from coda.ir import Program
from coda.passes import derive, fuse
from coda.runtime.binding import bind, shapes_of, type_shape
from coda.runtime.blocks import evaluate_partition
from tests.gradients import evaluate_wide

transformers = pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
B, T, D, F = 2, 5, 24, 40
F32_NORMS = 2e-5  # what a norm computed in f32 leaves of float64, relative to the largest element
BF16_ROUNDING = 2.0**-8

LLAMA = {
    "gamma": "input_layernorm.weight", "w_q": "self_attn.q_proj.weight", "w_k": "self_attn.k_proj.weight",
    "w_v": "self_attn.v_proj.weight",
}  # fmt: skip
LLAMA_MLP = {
    "w_o": "self_attn.o_proj.weight", "gamma": "post_attention_layernorm.weight", "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight", "w_down": "mlp.down_proj.weight",
}  # fmt: skip
HEAD_NORMS = {"g_q": "self_attn.q_norm.weight", "g_k": "self_attn.k_norm.weight"}
GEMMA_MLP = LLAMA_MLP | {
    "g_attn": "post_attention_layernorm.weight", "g_pre": "pre_feedforward_layernorm.weight",
    "g_post": "post_feedforward_layernorm.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A layer of transformers: how it is made, and which of its parameters the programs of an example call what."""

    file: str
    path: str  # module and class
    config: str
    programs: dict[str, dict[str, str]]
    heads: tuple[int, int, int] = (4, 2, 8)  # of queries, of keys and values, and the columns of each
    rotary: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    consts: dict[str, int] = field(default_factory=dict)

    def make(self, dtype: torch.dtype) -> nn.Module:
        module, name = self.path.rsplit(".", 1)
        models = __import__(f"transformers.models.{module}", fromlist=[name])
        hq, hk, d = self.heads
        sizes: dict[str, Any] = {
            "hidden_size": D, "intermediate_size": F, "num_attention_heads": hq, "num_key_value_heads": hk,
            "head_dim": d, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "vocab_size": 32,
        }  # fmt: skip
        config = getattr(transformers, self.config)(**(sizes | self.options))
        config._attn_implementation = "cut_out"
        torch.manual_seed(0)
        layer = getattr(models, name)(config, 0) if self.rotary or "gpt2" in module else getattr(models, name)(config)
        for p in layer.parameters():
            nn.init.normal_(p, std=0.4)
        return layer.eval().bfloat16().to(dtype)  # the same weights, whatever the dtype


LAYERS = {
    "llama3": Layer("llama3_block", "llama.modeling_llama.LlamaDecoderLayer", "LlamaConfig",
                    {"llama3_qkv": LLAMA, "llama3_mlp": LLAMA_MLP}),
    "mistral": Layer("mistral_block", "mistral.modeling_mistral.MistralDecoderLayer", "MistralConfig",
                     {"mistral_qkv": LLAMA, "mistral_mlp": LLAMA_MLP}),
    "qwen3": Layer("qwen3_block", "qwen3.modeling_qwen3.Qwen3DecoderLayer", "Qwen3Config",
                   {"qwen3_qkv": LLAMA | HEAD_NORMS, "qwen3_mlp": LLAMA_MLP}, heads=(4, 2, 128)),
    "gemma2": Layer("gemma2_block", "gemma2.modeling_gemma2.Gemma2DecoderLayer", "Gemma2Config",
                    {"gemma2_qkv": LLAMA, "gemma2_mlp": GEMMA_MLP}),
    "gemma3": Layer("gemma3_block", "gemma3.modeling_gemma3.Gemma3DecoderLayer", "Gemma3TextConfig",
                    {"gemma3_qkv": LLAMA | HEAD_NORMS, "gemma3_mlp": GEMMA_MLP}, heads=(2, 1, 256)),
    "phi3": Layer("phi3_block", "phi3.modeling_phi3.Phi3DecoderLayer", "Phi3Config",
                  {"phi3_qkv": {"gamma": LLAMA["gamma"], "w": "self_attn.qkv_proj.weight"},
                   "phi3_mlp": {"w_o": LLAMA_MLP["w_o"], "gamma": LLAMA_MLP["gamma"],
                                "w_gate_up": "mlp.gate_up_proj.weight", "w_down": LLAMA_MLP["w_down"]}},
                  consts={"HQ": 4, "HK": 2}, options={"pad_token_id": 0}),
    "gpt2": Layer("gpt2_block", "gpt2.modeling_gpt2.GPT2Block", "GPT2Config",
                  {"gpt2_qkv": {"g": "ln_1.weight", "b": "ln_1.bias", "w": "attn.c_attn.weight",
                                "bias": "attn.c_attn.bias"},
                   "gpt2_mlp": {"w_o": "attn.c_proj.weight", "b_o": "attn.c_proj.bias", "g": "ln_2.weight",
                                "b": "ln_2.bias", "w_in": "mlp.c_fc.weight", "b_in": "mlp.c_fc.bias",
                                "w_out": "mlp.c_proj.weight", "b_out": "mlp.c_proj.bias"}},
                  heads=(4, 4, 6), rotary=False, options={"n_embd": D, "n_head": 4, "n_inner": F}),
    "vit": Layer("vit_block", "dinov2.modeling_dinov2.Dinov2Layer", "Dinov2Config",
                 {"vit_qkv": {"g": "norm1.weight", "b": "norm1.bias",
                              **{f"{w}_{x}": f"attention.{x}_proj.{name}" for x in "qkv"
                                 for w, name in (("w", "weight"), ("b", "bias"))}},
                  "vit_mlp": {"w_o": "attention.o_proj.weight", "b_o": "attention.o_proj.bias",
                              "scale_1": "layer_scale1.lambda1", "g": "norm2.weight", "b": "norm2.bias",
                              "w_1": "mlp.fc1.weight", "b_1": "mlp.fc1.bias", "w_2": "mlp.fc2.weight",
                              "b_2": "mlp.fc2.bias", "scale_2": "layer_scale2.lambda1"}},
                 heads=(4, 4, 6), rotary=False, options={"mlp_ratio": 2}),
}  # fmt: skip
CASES = [(name, program) for name, layer in LAYERS.items() for program in layer.programs]


@dataclass
class Run:
    """One run of a layer: operands and results by the names that the program gives them, and gradients on demand."""

    operands: dict[str, Tensor]
    results: dict[str, Tensor]

    def gradients(self, seeds: dict[str, Tensor]) -> dict[str, Tensor]:
        wanted = [n for n, x in self.operands.items() if x.requires_grad]
        loss = sum((self.results[n] * s.to(self.results[n].dtype)).sum(dtype=torch.float64) for n, s in seeds.items())
        found = torch.autograd.grad(loss, [self.operands[n] for n in wanted], allow_unused=True)  # o, in front of it
        return {n: g for n, g in zip(wanted, found, strict=True) if g is not None}


def run_layer(layer: Layer, program: str, dtype: torch.dtype) -> Run:
    """A layer of transformers in a dtype, on operands that bf16 holds."""
    module = layer.make(dtype)
    hq, _, d = layer.heads
    random = torch.Generator().manual_seed(1)
    x, o = (torch.randn(B, T, n, generator=random).bfloat16().to(dtype).requires_grad_() for n in (D, hq * d))
    noted: dict[str, Tensor] = {}

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple:
        noted.update(q=q, k=k, v=v)
        return o.view(B, T, hq, d), None

    ALL_ATTENTION_FUNCTIONS.register("cut_out", attention)
    angles = torch.rand(T, d // 2, generator=random) * 6.28
    cos, sin = (f(angles).bfloat16().to(dtype) for f in (torch.cos, torch.sin))
    options = {}
    if layer.rotary:
        options["position_embeddings"] = tuple(torch.cat((t, t), -1).expand(B, T, d) for t in (cos, sin))
    y = module(x, **options)
    y = y if isinstance(y, Tensor) else y[0]
    weights = dict(module.named_parameters())
    operands = {"x": x, "o": o, **{name: weights[path] for name, path in layer.programs[program].items()}}
    pos = torch.arange(T, dtype=torch.int32).repeat(B)
    tables = {"pos": pos, "cos": cos.float(), "sin": sin.float()}
    return Run({**operands, **tables}, {"out": y, **noted})


def read(layer: Layer, program: str, wide: bool = False) -> Program:
    """``wide``: float64 operands are held as f32, so that no rounding is left of the declared dtypes."""
    text = (EXAMPLES / f"{layer.file}.coda").read_text()
    consts = layer.consts if program == "phi3_qkv" else {}
    return load(text.replace("bf16", "f32") if wide else text, consts).programs[program]


def operands_of(program: Program, run: Run) -> tuple[dict[str, Any], dict[str, int]]:
    """What the layer was given, in the shapes that the program has it, and all sizes. eps is the layers' 1e-6, but for
    GPT-2, whose default the program has."""
    sizes = {"B": B, "T": T}
    named = {p.name: run.operands[p.name] for p in program.params if p.name in run.operands}
    inputs: dict[str, Any] = {}
    for p in program.params:
        if p.name in named:
            x = named[p.name].detach()
            inputs[p.name] = x.reshape(B * T, -1) if p.name in ("x", "o") else x
    if "gpt2" not in program.name:
        inputs["eps"] = 1e-6
    known = {s.name for a in program.axes for s in a.size.free_symbols}
    if "gpt2_qkv" in program.name or "vit_qkv" in program.name:
        sizes |= {"H": 4, "d": 6}
    sizes |= {"f": run.operands["cos"].shape[1]}
    dims = {n: s for n, s in sizes.items() if n in known}
    return inputs, bind(program, shapes_of(inputs), dims)


def seeds_of(program: Program, sizes: dict[str, int]) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(2)
    return {o.name: torch.randn(type_shape(o.type, sizes), generator=random).bfloat16() for o in program.outputs}


def shaped(seeds: dict[str, Tensor], run: Run) -> dict[str, Tensor]:
    return {n: s.reshape(run.results[n].shape) for n, s in seeds.items()}


def known_sizes(program: Program, sizes: dict[str, int]) -> dict[str, int]:
    symbols = {s.name for a in program.axes for s in a.size.free_symbols}
    return {n: s for n, s in sizes.items() if n in symbols}


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    error = (got.double().reshape(want.shape) - want.double()).abs().max() / want.abs().max()
    assert error <= tolerance, (what, float(error))


@pytest.mark.parametrize(("name", "program"), CASES, ids=[p for _, p in CASES])
def test_a_block_is_the_layer(name: str, program: str) -> None:
    layer = LAYERS[name]
    run = run_layer(layer, program, torch.float64)
    p = read(layer, program, wide=True)
    inputs, sizes = operands_of(p, run)
    seeds = {n: s.double() for n, s in seeds_of(p, sizes).items()}
    backward, _ = derive(p)
    forward = evaluate_wide(p, inputs, known_sizes(p, sizes))
    for output in p.outputs:
        close(forward[output.name], run.results[output.name].detach(), F32_NORMS, output.name)
    both = backward.joined()
    got = evaluate_wide(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, known_sizes(both, sizes))
    want = run.gradients(shaped(seeds, run))
    assert {*backward.gradients} == {q.name for q in p.params if q.name in want}  # all that the layer has
    for param, output_name in backward.gradients.items():
        close(got[output_name], want[param], F32_NORMS, f"d_{param}")


@pytest.mark.parametrize(("name", "program"), CASES, ids=[p for _, p in CASES])
def test_its_kernels_are_no_less_accurate_than_the_layer(name: str, program: str) -> None:
    """Every rounding where the kernels have it; the yardstick is the layer in bf16."""
    layer = LAYERS[name]
    exact, eager = (run_layer(layer, program, dtype) for dtype in (torch.float64, torch.bfloat16))
    block = fuse(read(layer, program), None)
    assert block.backward is not None and block.gradients is not None
    inputs, sizes = operands_of(block.program, eager)
    seeds = seeds_of(block.program, sizes)
    kept = evaluate_partition(block.forward, inputs, dims=known_sizes(block.forward.program, sizes))
    side = block.backward.program
    known = {**inputs, **kept, **{f"d_{n}": s for n, s in seeds.items()}}
    calls = {q.name: known[q.name] for q in side.params if q.name in known}
    got = evaluate_partition(block.backward, calls, dims=known_sizes(side, sizes))
    results = {o.name: (kept[o.name], exact.results[o.name], eager.results[o.name]) for o in block.program.outputs}
    true, theirs = (run.gradients(shaped(seeds, run)) for run in (exact, eager))
    results |= {f"d_{n}": (got[o], true[n], theirs[n]) for n, o in block.gradients.gradients.items()}
    for what, (ours, reference, yardstick) in results.items():
        limit = max(2 * relative(yardstick, reference), BF16_ROUNDING)
        assert relative(ours, reference) <= limit, (what, relative(ours, reference), limit)


def relative(x: Tensor, reference: Tensor) -> float:
    reference = reference.detach().double()
    return float((x.detach().double().reshape(reference.shape) - reference).norm() / reference.norm())


# T5 has no choice of attention; its feed-forward layer and the products in front of attention are modules.


def t5(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    from transformers.models.t5.modeling_t5 import T5LayerFF, T5LayerSelfAttention

    config = transformers.T5Config(
        d_model=D, d_kv=6, d_ff=F, num_heads=4, feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6, dropout_rate=0
    )
    torch.manual_seed(0)
    layers = (T5LayerSelfAttention(config), T5LayerFF(config))
    for p in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(p, std=0.4)
    attention, ff = (layer.eval().bfloat16().to(dtype) for layer in layers)
    return attention, ff


def run_t5(program: str, dtype: torch.dtype) -> Run:
    attention, ff = t5(dtype)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype).requires_grad_()
    if program == "t5_ff":
        names = {"gamma": "layer_norm", "w_0": "DenseReluDense.wi_0", "w_1": "DenseReluDense.wi_1",
                 "w_out": "DenseReluDense.wo"}  # fmt: skip
        weights = {n: ff.get_submodule(path).weight for n, path in names.items()}
        return Run({"x": x, **weights}, {"out": ff(x)})
    noted: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, y: Tensor) -> None:
            noted[name] = y.view(B, T, 4, 6).transpose(1, 2)

        return hook

    for n in "qkv":
        getattr(attention.SelfAttention, n).register_forward_hook(note(n))
    attention(x)
    weights = {f"w_{n}": getattr(attention.SelfAttention, n).weight for n in "qkv"}
    return Run({"x": x, "gamma": attention.layer_norm.weight, **weights}, noted)


@pytest.mark.parametrize("program", ["t5_qkv", "t5_ff"])
def test_t5(program: str) -> None:
    run = run_t5(program, torch.float64)
    p = load((EXAMPLES / "t5_block.coda").read_text().replace("bf16", "f32")).programs[program]
    inputs = {q.name: run.operands[q.name].detach() for q in p.params if q.name in run.operands} | {"eps": 1e-6}
    inputs["x"] = inputs["x"].reshape(B * T, D)
    sizes = bind(p, shapes_of(inputs), {"B": B, "T": T, "H": 4, "d": 6} if program == "t5_qkv" else {})
    backward, _ = derive(p)
    seeds = {n: s.double() for n, s in seeds_of(p, sizes).items()}
    forward = evaluate_wide(p, inputs, known_sizes(p, sizes))
    for output in p.outputs:
        close(forward[output.name], run.results[output.name].detach(), F32_NORMS, output.name)
    both = backward.joined()
    got = evaluate_wide(both, {**inputs, **{f"d_{n}": s for n, s in seeds.items()}}, known_sizes(both, sizes))
    for param, want in run.gradients(shaped(seeds, run)).items():
        close(got[backward.gradients[param]], want, F32_NORMS, f"d_{param}")
