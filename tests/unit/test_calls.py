"""Opaque calls: their types, what they do, their gradients, and what surrounds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import coda
from coda.cli import main
from coda.errors import CodaError
from coda.frontend import load, load_path
from coda.ir import Program
from coda.passes import derive, fuse
from coda.passes.eager import round_as_eager
from coda.passes.segments import has_calls, segments
from coda.runtime import externs
from coda.runtime.binding import type_shape
from coda.runtime.chain import ChainedProgram
from coda.runtime.compare import compare
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate
from coda.target.blocks import lower_program
from tests.gradients import check_gradients, check_text, evaluate_wide

LAYER = Path(__file__).parents[2] / "examples" / "llama3_layer.coda"
SCAN = "extern scan(x: f32[M, D], a: f32[D]) -> y: f32[M, D], last: f32[D]\n"
BACKWARD = "extern scan_backward(x: f32[M, D], a: f32[D], d_y: f32[M, D]) -> d_x: f32[M, D], d_a: f32[D]\n"
ONE = SCAN.replace(", last: f32[D]", "")  # with one result
PROGRAM = """program p(x: f32[(B T), N], w: bf16[E, N], a: f32[N]) {
    y, last = scan(x * 2, a)
    return cast(y, bf16) @ w.T: bf16, last
}
"""
OPERANDS = {"x": torch.randn(6, 8), "w": torch.randn(4, 8).bfloat16(), "a": torch.rand(8)}
SIZES = {"B": 2, "T": 3, "N": 8, "E": 4}


@pytest.fixture
def scan(monkeypatch):
    """A cumulative sum that forgets, and how often it was called."""
    calls = []

    def scan(x, a):
        calls.append(x.dtype)
        state, rows = torch.zeros_like(a), []
        for row in x:
            state = a * state + row
            rows.append(state)
        return torch.stack(rows), state

    def backward(x, a, d_y):
        with torch.enable_grad():
            leaves = x.detach().requires_grad_(), a.detach().requires_grad_()
            return torch.autograd.grad(scan(*leaves)[0], leaves, d_y)

    monkeypatch.setitem(externs._REGISTERED, "scan", scan)
    monkeypatch.setitem(externs._REGISTERED, "scan_backward", backward)
    return calls


def program(declarations: str = SCAN + BACKWARD, returned: str = "last"):
    """The program above, which returns ``last`` or not, where it is declared."""
    source = PROGRAM if "last" in declarations else PROGRAM.replace("y, last =", "y =")
    return load(declarations + (source if returned == "last" else source.replace(", last\n", "\n"))).programs["p"]


def layer():
    return load_path(LAYER, {"HQ": 4, "HK": 2, "f": 4}).programs["llama3_layer"]


def test_it_prints_and_reads_back():
    p = program()
    check_text(p)
    (call,) = {n.args: n for n in p.nodes() if n.op == "call"}.values()
    assert [str(a.type) for a in call.args] == ["f32[(B T), N]", "f32[N]"]
    assert sorted(str(n.type) for n in p.nodes() if n.op == "call") == ["f32[(B T), N]", "f32[N]"]


def test_one_call_gives_all_results(scan):
    got = evaluate(program(), OPERANDS, dims={"B": 2})
    assert len(scan) == 1
    x, w, a = OPERANDS.values()
    y, last = externs._REGISTERED["scan"](2 * x, a)
    torch.testing.assert_close(got["last"], last)
    torch.testing.assert_close(got["out0"], (y.bfloat16().float() @ w.float().T).bfloat16())


def test_gradients_are_a_typed_call_of_the_derivative(scan):
    inner = externs._REGISTERED["scan"]
    externs._REGISTERED["scan"] = lambda x, a: inner(x, a)[0]
    backward = check_gradients(program(ONE + BACKWARD, "y"), SIZES)
    calls = [n for n in backward.backward.nodes() if n.op == "call" and n.attr("callee").name == "scan_backward"]
    assert sorted(str(n.type) for n in calls) == ["f32[(B T), N]", "f32[N]"]
    check_text(derive(program(ONE + BACKWARD, "y"))[0].backward)


def test_gradients_by_autograd_where_no_derivative_is_registered(scan):
    del externs._REGISTERED["scan_backward"]
    inner = externs._REGISTERED["scan"]
    externs._REGISTERED["scan"] = lambda x, a: inner(x, a)[0]
    check_gradients(program(ONE + BACKWARD, "y"), SIZES)


@pytest.mark.parametrize(("declarations", "last", "message"), [
    (SCAN, "last", "extern 'scan' has no derivative"),
    (SCAN + BACKWARD, "last", "does not take 'd_last'"),
    (SCAN + BACKWARD.replace(", d_a: f32[D]", ""), "y", "does not return 'd_a'"),
    (SCAN + BACKWARD.replace("d_y: f32[M, D])", "d_y: f32[M, D], d_last: f32[D])"), "y", "no gradient reaches 'last'"),
])  # fmt: skip
def test_a_gradient_that_cannot_be_had_is_an_error(declarations, last, message):
    with pytest.raises(CodaError, match=message) as error:
        derive(program(declarations, last))
    assert error.value.diagnostics[0].span is not None
    if declarations == SCAN:
        assert "extern scan_backward(x: f32[M, D], a: f32[D], d_y: f32[M, D]" in error.value.diagnostics[0].hint


@pytest.mark.parametrize(("old", "new", "message"), [
    ("scan(x * 2, a)", "scan(x * 2)", "lacks its operand 'a'"),
    ("scan(x * 2, a)", "scan(x * 2, a, a=a)", "'a' is given twice"),
    ("scan(x * 2, a)", "scan(x * 2, b=a)", "'b' is no operand"),
    ("scan(x * 2, a)", "scan(a, a)", "takes x: f32.M, D., got f32.N."),
    ("scan(x * 2, a)", "scan(x.T, a)", "axis 'D' of 'scan' is .B T. in x and .N. in a"),
    ("a: f32[D])", "a: f32[D]?)", "operands and results of an extern are tensors"),
    ("-> y: f32[M, D]", "-> y: f32[M, E]", "no operand has axis 'E'"),
    ("last: f32[D]", "y: f32[D]", "'y' stands twice"),
    ("y: f32[M, D], last", "y: f33[M, D], last", "unknown dtype 'f33'"),
    ("d_y: f32[M, D])", "d_z: f32[M, D])", "'d_z' is no operand or result of 'scan'"),
    ("d_x: f32[M, D], d_a", "d_x: f32[D, M], d_a", "'d_x' is f32.D, M. here and f32.M, D. there"),
    ("y, last = scan", "y, last = scann", "there is no function 'scann'"),
    ("extern scan(", "extern scan ", "unexpected"),
])  # fmt: skip
def test_mistakes(old, new, message):
    source = SCAN + BACKWARD + PROGRAM
    assert old in source
    with pytest.raises(CodaError, match=message) as error:
        load(source.replace(old, new, 1))
    assert error.value.diagnostics[0].span is not None


def test_what_nobody_registered_is_said():
    with pytest.raises(CodaError, match="nothing is registered for extern 'scan'"):
        evaluate(program(), OPERANDS, dims={"B": 2})


def test_a_result_of_another_size_is_said(scan):
    externs._REGISTERED["scan"] = lambda x, a: (x[1:], a)
    with pytest.raises(CodaError, match="returned 'y' of shape"):
        evaluate(program(), OPERANDS, dims={"B": 2})


def test_register_takes_a_function_and_decorates(monkeypatch):
    monkeypatch.setattr(externs, "_REGISTERED", {})
    assert coda.register("f", abs) is abs

    @coda.register("g")
    def g(x):
        return x

    assert externs._REGISTERED["f"] is abs
    assert externs._REGISTERED["g"] is g


def test_eager_rounding_leaves_the_call_alone():
    p = layer()
    rounded = round_as_eager(p)
    assert round_as_eager(rounded) == rounded
    assert sum(n.op == "call" for n in rounded.nodes()) == 1


def test_a_layer_is_the_one_of_hugging_face():
    """Forward and the gradients of all parameters, in float64, with random weights."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    b, t, heads, groups, d, width, inner = 2, 5, 4, 2, 8, 24, 40
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=groups, head_dim=d,
        rms_norm_eps=1e-5, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = modeling.LlamaDecoderLayer(config, 0)
    for name in ("input_layernorm", "post_attention_layernorm"):  # theirs computes in f32, whatever the dtype
        setattr(layer, name, torch.nn.RMSNorm(width, 1e-5))
    layer = layer.double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(b, t, width, dtype=torch.float64, requires_grad=True)
    cos, sin = modeling.LlamaRotaryEmbedding(config)(x, torch.arange(t)[None])
    y = layer(x, position_embeddings=(cos.double(), sin.double()))
    y = y if isinstance(y, torch.Tensor) else y[0]
    seed = torch.randn_like(y)
    names = {
        "gamma_attention": "input_layernorm", "w_q": "self_attn.q_proj", "w_k": "self_attn.k_proj",
        "w_v": "self_attn.v_proj", "w_o": "self_attn.o_proj", "gamma_mlp": "post_attention_layernorm",
        "w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj",
    }  # fmt: skip
    weights = {name: layer.get_submodule(path).weight for name, path in names.items()}
    y.backward(seed)
    source = LAYER.read_text().replace("bf16", "f32")  # float64 operands are read as f32: no rounding in exact mode
    consts = {"HQ": heads, "HK": groups, "f": d // 2}
    backward, _ = derive(load(source, consts).programs["llama3_layer"])
    tables = {"cos": cos[0, :, : d // 2].double(), "sin": sin[0, :, : d // 2].double()}
    inputs = {"x": x.detach().view(b * t, width), "pos": torch.arange(t, dtype=torch.int32).repeat(b), **tables}
    inputs |= {name: w.detach() for name, w in weights.items()}
    got = evaluate_wide(backward.joined(), {**inputs, "d_out": seed.view(b * t, width)}, {"B": b})
    torch.testing.assert_close(got["d_x"].view_as(x), x.grad, rtol=1e-9, atol=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(got[f"d_{name}"], weight.grad, rtol=1e-9, atol=1e-9)
    forward = evaluate_wide(backward.forward, inputs, {"B": b})
    torch.testing.assert_close(forward["out"].view_as(y), y, rtol=1e-9, atol=1e-9)


def test_kernels_lie_on_both_sides_of_the_call():
    block = fuse(layer(), None)
    (call,) = (k for k in block.backward.kernels if k.kind == "call")
    assert call.reads == {"q", "k", "v", "d_o"}
    assert call.writes == {"d_q", "d_k", "d_v"}
    assert {"q", "k", "v", "o"} <= set(block.gradients.saved)
    assert not any(n.op == "call" and n.attr("callee").name == "causal_attention"
                   for n in block.backward.program.nodes())  # fmt: skip


# Segments: what is compiled of a program with calls.


def test_segments_and_calls_make_up_the_program():
    block = fuse(layer(), None)
    for side in (block.forward, block.backward):
        parts = segments(side)
        assert [isinstance(p, Program) for p in parts] == [True, False, True]
        for part in parts:
            check_text(part if isinstance(part, Program) else part.program)
        assert not any(has_calls(p) for p in parts if isinstance(p, Program))


class Interpreted:
    """A segment's artifact that runs the interpreter, with CPU tensors for those of a GPU."""

    def __init__(self, p, dims=None):
        self.p, self.dims = p, dims

    def check(self, args):
        return None

    def output_shapes(self, sizes):
        return {o.name: type_shape(o.type, sizes) for o in self.p.outputs if o.into is None}

    def workspace_bytes(self, args):
        return 0

    def warmup(self, device):
        raise AssertionError

    def run(self, args, workspace, stream):
        names = [*(p.name for p in self.p.params), *(o.name for o in self.p.outputs if o.into is None)]
        given = dict(zip(names, args, strict=True))
        results = evaluate(self.p, {p.name: given[p.name] for p in self.p.params}, dims=self.dims)
        for o in self.p.outputs:
            given[o.into or o.name].copy_(results[o.name].view(given[o.into or o.name].shape))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_chain_calls_between_its_segments(backward):
    """Every number of rows finds its own sizes; artifacts are built once."""
    p, built = derive(layer())[0].backward if backward else layer(), []

    def build(part, sizes, tile):
        built.append(part.name)
        return Interpreted(part, {"B": 2})

    f = ChainedProgram(p, {"B": 2}, build=build, device_type="cpu", parts=segments(fuse(p).forward))
    for rows in (6, 10, 6):
        inputs = random_inputs(p, {"B": 2, "T": rows // 2, "D": 64, "F": 96, "P": 8}, rows)
        before = {n: x.clone() for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        got = f(**inputs)
        got = got if backward else (got,)
        comparison = compare(p, inputs, {o.name: x for o, x in zip(p.outputs, got, strict=True)}, dims={"B": 2})
        assert comparison.ok, comparison
        assert f.last_route.kind == "kernel"
        assert all(torch.equal(x, inputs[n]) for n, x in before.items())
        out = [torch.full_like(x, float("nan")) for x in got]
        f(**inputs, out=out)
        assert all(torch.equal(a, b) for a, b in zip(out, got, strict=True))
    assert built == [f"{p.name}_1", f"{p.name}_2"]


def test_a_compiled_layer_runs_on_the_cpu_as_it_is_written():
    p = layer()
    f = coda.compile(p, B=2)
    inputs = random_inputs(p, {"B": 2, "T": 3, "D": 16, "F": 24, "P": 8})
    assert torch.equal(f(**inputs), evaluate(p, inputs, dims={"B": 2})["out"])
    assert f.last_route.kind == "reference"


def test_one_artifact_cannot_call():
    with pytest.raises(CodaError, match="'llama3_layer' calls causal_attention, which no kernel computes"):
        lower_program(layer())


def test_the_command_lowers_each_segment(tmp_path, capsys):
    source = tmp_path / "mixed.coda"
    source.write_text("""extern mix(y: bf16[M, N]) -> z: bf16[M, N]
    program mixed(x: bf16[M, K], w: bf16[N, K], v: bf16[K, N]) {
        z = mix(x @ w.T)
        return x + z @ v.T: bf16
    }""")
    assert main(["lower", str(source), "--no-build", "--json", "--dims", "M=512,K=256,N=512"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["programs"]
    assert report["calls"] == [{"call": "mix", "reads": ["t"], "writes": ["z"]}]
    assert (first["program"], second["program"]) == ("mixed_1", "mixed_2")
    assert first["kernels"] == ["mixed_1"]


def test_explain_lists_the_call(capsys):
    assert main(["explain", str(LAYER), "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    (call,) = (k for k in kernels if k["kind"] == "opaque")
    assert "opaque function" in call["reason"]
    assert [t["name"] for t in call["reads"]] == ["q", "k", "v"]


def test_a_derived_file_declares_each_extern_once(tmp_path):
    for options in ((), ("--kernels",)):
        out = tmp_path / "both.coda"
        assert main(["derive", str(LAYER), "-o", str(out), *options]) == 0
        programs = load_path(out).programs
        assert options or list(programs) == ["llama3_layer", "llama3_layer_backward"]
        assert sum("call" in {n.op for n in p.nodes()} for p in programs.values()) == 2


TWICE = """program twice(x: f32[M, N], w: bf16[N2, N], a: f32[N], a2: f32[N2], inout total: f32[N2, N]) {
    dim N2 = N
    y = scan(x * 2, a)
    z: f32[M, N2] = cast(y, bf16) @ w.T
    t = scan(layout(z, [M, N2]), a2)
    total += cast(t, bf16).T @ cast(y, bf16)
    return t: f32, y: f32
}
"""


def test_calls_one_behind_the_other(scan):
    """What the second needs of the first lies between; accumulations belong to the segment that makes them."""
    inner = externs._REGISTERED["scan"]
    externs._REGISTERED["scan"] = lambda x, a: inner(x, a)[0]
    p = load(ONE + BACKWARD + TWICE).programs["twice"]
    cut = fuse(p).forward
    parts = segments(cut)
    kinds = [isinstance(part, Program) for part in parts]
    assert kinds == [True, False, True, False, True]
    for part in parts:
        check_text(part if isinstance(part, Program) else part.program)
    assert [q.name for q in parts[-1].params if q.inout] == ["total"]
    inputs = random_inputs(p, {"M": 5, "N": 8})
    f = ChainedProgram(p, build=lambda part, sizes, tile: Interpreted(part), device_type="cpu", parts=parts)
    before = inputs["total"].clone()
    want = evaluate(p, {**inputs, "total": before})
    got = f(**inputs)
    torch.testing.assert_close(got[0], want["t"])
    torch.testing.assert_close(inputs["total"], want["total"])
    check_gradients(p, {"M": 5, "N": 8}, wrt=["x", "w", "a"], of=["t", "y"])
