"""Programs of models as steps on a GPU, run on a CPU: what each launch would read and write fits together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coda.dtypes import torch_dtype
from coda.frontend import load, load_path
from coda.ir import Program
from coda.nn.loss import program_text
from coda.printer import print_program
from coda.pytorch import op
from coda.pytorch.block import Block, Options, block, one_line
from coda.pytorch.execute import execute, run_steps, steps
from coda.runtime.binding import type_shape
from coda.runtime.library import Artifact
from coda.runtime.reference import evaluate_sized
from coda.target.blocks import lower_program
from tests.abi.harness import host_of
from tests.pytorch.handwritten import WIDE
from tests.pytorch.models import inputs, step, tiny

SIZE = 3


def blocks(name: str, reports) -> list[Block]:
    """The blocks of a training step of a model."""
    model, given = tiny(name, torch.bfloat16), inputs(name, torch.bfloat16)
    torch.compile(model, backend="coda", options={"inductor": False})(**given)
    return [block(text, options) for r in reports for text, options in zip(r.texts, r.options, strict=True)]


def operands(program: Program, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for p in program.params:
        shape = type_shape(p.type, sizes)
        if p.type.dtype.kind == "int":
            made[p.name] = torch.zeros(shape, dtype=torch_dtype(p.type.dtype))
        else:
            made[p.name] = torch.randn(shape, generator=generator).abs().to(torch_dtype(p.type.dtype))
    return made


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_steps_give_what_the_program_means(name, reports):
    for it in dict.fromkeys(blocks(name, reports)):
        wanted = tuple(it.gradients.gradients)
        for program in (it.forward, it.backward(wanted)[0]):
            sizes = dict.fromkeys(it.options.sizes, SIZE)
            given = operands(program, sizes)
            want, got = evaluate_sized(program, given, sizes), run_steps(program, given, sizes, "copy")
            assert got.keys() == want.keys()
            for output, exact in want.items():
                torch.testing.assert_close(got[output], exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max()))


def test_a_block_of_llama_is_lowered_whole(reports):
    """With heads of 64 columns forward programs are one artifact each: no step runs in the interpreter."""
    for it in blocks("llama_heads", reports):
        (step,) = steps(it.forward, "copy")
        assert step.reason is None


def test_a_reason_is_recorded():
    it = block("program p(x: f32[M, K=8], w: f32[N=8, K]) { return y = relu(x @ w.T): f32 }", Options(("M",)).text())
    (step,) = steps(it.forward, "copy")
    assert step.reason is not None


def test_texts_have_no_line_breaks():
    """Inductor of torch 2.11 writes the arguments of a call into a comment, which a line break would end."""
    program = load_path(Path(__file__).parents[2] / "examples/llama3_block.coda").programs["llama3_qkv"]
    text = one_line(print_program(program))
    it = block(text, Options(("B", "T"), wrt=("x", "w_q")).text())
    assert it.program == program
    loss = program_text(
        (("x", torch.bfloat16), ("w", torch.bfloat16), ("target", torch.int64)), -100, "mean", 0, 0, None
    )
    for words in (text, it.backward(("x", "w_q"))[1], loss):
        assert "\n" not in words and load(words)


@pytest.mark.slow  # compiles launchers
@pytest.mark.parametrize("name", ["llama", "titan", "gpt2", "gemma2"])
def test_kernels_take_what_a_training_step_gives_them(name, monkeypatch, tmp_path):
    """Each program of a model is one artifact, and its launcher accepts the operands: sizes, strides, alignment."""
    calls = {}

    def remembering(program, inputs, sizes, *how):
        calls.setdefault(program, (inputs, sizes))
        return execute(program, inputs, sizes, *how)

    monkeypatch.setattr(op, "execute", remembering)
    model, given = tiny(name, torch.bfloat16, WIDE), inputs(name, torch.bfloat16, 2, 40)
    if hasattr(model, "config"):
        model.config.use_cache = False
    step(torch.compile(model, backend="coda", options={"inductor": False}), model, given)
    assert len(calls) == 6  # forward and backward of the first region, those between attentions, and the last
    for i, (program, (operands, sizes)) in enumerate(calls.items()):
        artifact = Artifact(host_of(tmp_path / str(i), lower_program(program)))
        known = sizes | {a.name: int(a.size) for a in program.axes if a.static is not None}
        shapes, dtypes = artifact.output_shapes(known), {o.name: torch_dtype(o.type.dtype) for o in program.outputs}
        results = [torch.empty(shape, dtype=dtypes[n]) for n, shape in shapes.items()]
        assert artifact.check([*(operands[p.name] for p in program.params), *results]) is None
