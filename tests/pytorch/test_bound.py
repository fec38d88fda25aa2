"""Calls of the op that repeat an earlier one: which addresses they pass on, and when they are not repeated."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from coda.errors import CodaError
from coda.pytorch import bound, op
from coda.pytorch.block import Options, block
from coda.pytorch.execute import Step
from coda.runtime.callable import CompiledProgram
from tests.abi.harness import Recorder, recorder

TEXT = "program p(x: bf16[(B T), D=16], w: bf16[F=24, D]) { return y = relu(x @ w.T): bf16[(B T), F] }"
OPTIONS = Options(sizes=("B", "T"), shapes={"y": (("B",), ("T",), ("F",))})


class Prepared:
    def __init__(self, artifact, args):
        self.artifact, self.layouts = artifact, [(tuple(x.shape), x.stride()) for x in args]

    def run(self, addresses, workspace, stream):
        if self.artifact.refuses:
            raise CodaError.of("refused")
        self.artifact.prepared_runs.append((addresses, workspace.nbytes))


class Fake:
    """An artifact on the CPU whose results are ones."""

    def __init__(self):
        self.runs, self.prepared_runs, self.refuses = 0, [], False

    def check(self, args):
        return None

    def output_shapes(self, sizes):
        return {"y": (sizes["B"] * sizes["T"], 24)}

    def workspace_bytes(self, args):
        return 64

    def run(self, args, workspace, stream):
        self.runs += 1
        args[-1].fill_(1)

    def prepare(self, args):
        return Prepared(self, args)


@pytest.fixture
def fake(monkeypatch):
    """The op with a fake artifact, and no bound calls."""
    artifact, it = Fake(), block(TEXT, OPTIONS.text())
    step = Step(it.forward, "copy", None)
    step.compiled = CompiledProgram(it.forward, artifact=artifact, device_type="cpu")
    calls = bound.Calls(it)
    monkeypatch.setattr(bound, "steps", lambda *args: (step,))
    monkeypatch.setattr(op, "bound_calls", lambda *args: calls)
    monkeypatch.setattr(op, "execute", lambda program, inputs, sizes, *args: step.run(inputs, sizes))
    monkeypatch.setattr(op, "is_bound", lambda tensors: True)
    return artifact


def operands(length=3):
    return [torch.randn(2, length, 16).bfloat16(), torch.randn(24, 16).bfloat16()]


def call(tensors):
    return op.run_block(tensors, list(tensors[0].shape[:2]), TEXT, OPTIONS.text())


def test_the_second_call_only_passes_addresses(fake):
    first, second = operands(), operands()
    assert call(first)[0].shape == (2, 3, 24)
    (y,) = call(second)
    assert y.shape == (2, 3, 24) and fake.runs == 1
    assert fake.prepared_runs == [([*(x.data_ptr() for x in second), y.data_ptr()], 64)]


def test_other_layouts_are_other_calls(fake):
    x, w = operands()
    for tensors in ([x, w], operands(4), [x, w.T.contiguous().T], [torch.randn(2, 3, 17).bfloat16()[..., 1:], w]):
        call(tensors)
    assert fake.runs == 4 and not fake.prepared_runs


def test_an_operand_whose_rows_are_no_view_is_flattened_again(fake):
    x, w = operands()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    for _ in range(2):
        call([turned, w])
    ((addresses, _),) = fake.prepared_runs
    assert fake.runs == 1 and turned.data_ptr() not in addresses and addresses[1] == w.data_ptr()


def test_what_the_kernel_refuses_is_looked_at_anew(fake):
    call(operands())
    fake.refuses = True
    call(operands())
    assert fake.runs == 2


def test_k4_no_tensor_is_kept(fake):
    tensors = operands()
    for _ in range(2):
        call(tensors)
    watched = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert all(w() is None for w in watched)


def test_prepared_arguments_launch_the_same():
    """Over the fake CUDA runtime: what a prepared call hands to the kernels is what the call itself does."""
    record: Recorder = recorder("plain")
    one, other = ([torch.zeros(s, dtype=torch.bfloat16) for s in ((128, 64), (64, 64), (128, 64))] for _ in range(2))
    prepared = record.artifact.prepare(one)
    for struct in prepared._layouts.tensors:
        struct.device_type = 2
    record.reset()
    record.run(other)
    want = record.calls()[-3:]
    record.reset()
    prepared.run([x.data_ptr() for x in other], torch.empty(256, dtype=torch.uint8), 0)
    got = record.calls()[-3:]
    assert [c["call"] for c in got] == ["encode", "encode", "launch"]
    assert got == want
