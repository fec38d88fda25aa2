"""Programs as functions: arguments, routes, fallbacks. The artifact is a fake that runs the interpreter on the CPU."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch

import coda
from coda.errors import CodaError
from coda.runtime.callable import CompiledProgram
from coda.runtime.layout import is_regular, regular_like
from coda.runtime.reference import evaluate
from tests.support import BIAS_GELU, RESIDUAL_STATS, ROW_SCALE, bf16, program

M, N, K = 5, 6, 16


class FakeArtifact:
    """Accepts regular tensors only, unless told to refuse everything; runs the interpreter into its outputs."""

    def __init__(self, program, refuse: str | None = None):
        self.program, self.refuse = program, refuse
        self.runs = self.warmups = 0

    @property
    def names(self):
        return [p.name for p in self.program.params] + [o.name for o in self.program.outputs if o.into is None]

    def check(self, args):
        if self.refuse:
            return self.refuse
        for name, x in zip(self.names, args, strict=True):
            if isinstance(x, torch.Tensor) and x.dim() == 2 and not is_regular(x):
                return f"operand '{name}' has rows that TMA cannot read"
        return None

    def output_shapes(self, sizes):
        from coda.runtime.binding import type_shape

        return {o.name: type_shape(o.type, sizes) for o in self.program.outputs}

    def workspace_bytes(self, args):
        return 128

    def run(self, args, workspace, stream):
        if refusal := self.check(args):
            raise CodaError.of(refusal)
        assert workspace.numel() == 128
        self.runs += 1
        given = dict(zip(self.names, args, strict=True))
        inputs = {p.name: given[p.name] for p in self.program.params}
        for name, result in evaluate(self.program, inputs).items():
            output = next(o for o in self.program.outputs if o.name == name)
            given[output.into or name].copy_(result)

    def warmup(self, device):
        self.warmups += 1


def faked(text: str, fallback: str = "copy", refuse: str | None = None) -> CompiledProgram:
    p = program(text)
    return CompiledProgram(p, fallback=fallback, artifact=FakeArtifact(p, refuse), device_type="cpu")


def stats_operands():
    return bf16(M, K), bf16(N, K)[:, :], bf16(M, 8)[:, :N]


# Arguments and results.


def test_positional_and_named_arguments_agree():
    f = coda.compile(RESIDUAL_STATS)
    o, w, x = stats_operands()
    h, s = f(o, w, x)
    h2, s2 = f(x=x, o=o, w=w)
    assert torch.equal(h, h2)
    assert torch.equal(s, s2)


def test_one_output_is_a_tensor_and_absent_operands_may_be_left_out():
    f = coda.compile(BIAS_GELU)
    x, w = bf16(M, K), bf16(N, K)
    assert torch.equal(f(x, w), f(x, w, None))


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, 2, 3, 4), {}, "takes 3 operands (x, w, bias), got 4"),
        ((1,), {"x": 2}, "operand 'x' is given twice"),
        ((), {"weights": 1}, "has no parameter 'weights'"),
        ((), {}, "operand 'x': bf16[M, K] is missing"),
    ],
)
def test_arguments_are_checked(args, kwargs, text):
    with pytest.raises(CodaError) as caught:
        coda.compile(BIAS_GELU)(*args, **kwargs)
    assert text in str(caught.value)


def test_a_parameter_may_be_called_out():
    f = coda.compile("program p(out: bf16[M, N], x: bf16[M, N]) { return y = out + 2 * x: bf16 }")
    a, b = bf16(M, N), bf16(M, N)
    assert torch.equal(f(out=a, x=b), f(a, b)) and torch.equal(f(a, x=b), f(a, b))
    with pytest.raises(CodaError, match="operand 'out' is given twice"):
        f(a, b, out=a)


@pytest.mark.parametrize("lead", [(2, 3), (2, 1, 3), (0, 3), (1, 6)])
def test_leading_dims_come_back(lead):
    f = coda.compile(RESIDUAL_STATS)
    o, w, x = bf16(*lead, K), bf16(N, K), bf16(*lead, N)
    h, s = f(o, w, x)
    flat_h, flat_s = f(o.reshape(-1, K), w, x.reshape(-1, N))
    assert h.shape == (*lead, N)
    assert s.shape == lead
    assert torch.equal(h.reshape(-1, N), flat_h)
    assert torch.equal(s.reshape(-1), flat_s)


def test_leading_dims_of_a_vector():
    f = coda.compile(ROW_SCALE)
    x, w, r = bf16(2, 3, K), bf16(N, K), torch.randn(2, 3)
    assert f(x, w, r).shape == (2, 3, N)


def test_leading_dims_must_agree():
    with pytest.raises(CodaError, match=r"operand 'x' has leading sizes \[3, 2\]"):
        coda.compile(RESIDUAL_STATS)(bf16(2, 3, K), bf16(N, K), bf16(3, 2, N))


def test_a_weight_has_no_leading_dims():
    with pytest.raises(CodaError, match="operand 'w' has 3 dims"):
        coda.compile(RESIDUAL_STATS)(bf16(M, K), bf16(1, N, K), bf16(M, N))


def test_preallocated_outputs():
    f = coda.compile(RESIDUAL_STATS)
    o, w, x = stats_operands()
    h, s = torch.empty(M, N).bfloat16(), torch.empty(M)
    got = f(o, w, x, out=(h, s))
    assert got[0] is h
    assert got[1] is s
    want = f(o, w, x)
    assert torch.equal(h, want[0])
    only = torch.empty(M)
    assert f(o, w, x, out={"s": only})[1] is only


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ((torch.empty(M, N).bfloat16(),), "out= has 1 tensors, the program returns 2 (h, s)"),
        ({"h": torch.empty(N, M).bfloat16()}, "out= for 'h' has shape [6, 5], expected [5, 6]"),
        ({"h": torch.empty(M, N)}, "out= for 'h' is torch.float32"),
        ({"t": torch.empty(M, N)}, "out= names 't', which is no output"),
    ],
)
def test_preallocated_outputs_are_checked(out, text):
    with pytest.raises(CodaError) as caught:
        coda.compile(RESIDUAL_STATS)(*stats_operands(), out=out)
    assert text in str(caught.value)


def test_an_output_may_not_be_an_operand():
    o, w, x = stats_operands()
    with pytest.raises(CodaError, match="out= for 'h' shares memory with operand 'x'"):
        coda.compile(RESIDUAL_STATS)(o, w, x, out={"h": x})


WGRAD = """
program wgrad(dy: bf16[M, N], x: bf16[M, K], inout dw: f32[N, K]) {
    dw += dy.T @ x
}
"""


@pytest.mark.parametrize("make", [lambda: coda.compile(WGRAD), lambda: faked(WGRAD)], ids=["reference", "kernel"])
def test_accumulation_happens_in_place(make):
    dy, x, dw = bf16(M, N), bf16(M, K), torch.randn(N, K)
    want, version = dw + dy.float().T @ x.float(), dw._version
    if isinstance(make().artifact, FakeArtifact):
        dy = torch.nn.functional.pad(dy, (0, 2))[:, :N]  # rows of aligned pitch
    assert make()(dy, x, dw) is None
    torch.testing.assert_close(dw, want)
    assert dw._version > version


def test_operands_are_never_modified():
    for f in (coda.compile(RESIDUAL_STATS), faked(RESIDUAL_STATS)):
        operands = stats_operands()
        before = [t.clone() for t in operands]
        f(*operands)
        assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_no_tensor_is_kept_alive():
    f = faked(RESIDUAL_STATS)
    o, w, x = stats_operands()
    watched = [weakref.ref(t) for t in (o, w, x, *f(o, w, x))]
    del o, w, x
    assert [r() for r in watched] == [None] * 5


def test_a_gradient_is_refused_rather_than_missing():
    f = coda.compile(BIAS_GELU)
    x, w = bf16(M, K).requires_grad_(), bf16(N, K)
    y = f(x, w)
    assert y.requires_grad
    with pytest.raises(CodaError, match="without derivative"):
        y.sum().backward()
    with torch.no_grad():
        assert not f(x, w).requires_grad
    assert not f(x.detach(), w).requires_grad


# Routes.


def test_the_reference_runs_on_the_cpu_and_says_so():
    f = coda.compile(BIAS_GELU)
    f(bf16(M, K), bf16(N, K))
    assert str(f.last_route) == "reference: the operands are on cpu"


def test_accepted_operands_run_as_they_are():
    f = faked(RESIDUAL_STATS)
    o, w, x = stats_operands()
    out = (regular_like(bf16(M, N)), torch.empty(M))
    h, s = f(o, w, x, out=out)
    assert (f.last_route.kind, f.last_route.copied, f.artifact.runs) == ("kernel", (), 1)
    want = evaluate(f.program, {"o": o, "w": w, "x": x})
    assert torch.equal(h, want["h"])
    assert torch.equal(s, want["s"])


def test_a_refusal_is_cured_by_copies_of_what_it_names():
    """Case A8: no copy is made in silence."""
    f = faked(RESIDUAL_STATS)
    o, w, x = bf16(M, 2 * K)[:, ::2], bf16(N, K), bf16(M, N)
    h, _ = f(o, w, x)
    assert f.last_route.kind == "copy"
    assert f.last_route.copied == ("o", "x", "h")  # 6 columns of bf16 are no aligned pitch
    assert str(f.last_route).startswith("copy of o, x, h: operand 'o' has rows that TMA cannot read")
    assert torch.equal(h, evaluate(f.program, {"o": o, "w": w, "x": x})["h"])
    assert h.is_contiguous()


def test_a_refusal_that_nothing_cures_goes_to_the_reference():
    f = faked(RESIDUAL_STATS, refuse="the accumulators do not fit")
    with pytest.warns(UserWarning, match="runs in the reference interpreter.*: the accumulators do not fit"):
        f(*stats_operands())
    assert f.artifact.runs == 0
    assert str(f.last_route) == "reference: the accumulators do not fit"


def test_fallback_reference_makes_no_copies():
    f = faked(RESIDUAL_STATS, fallback="reference")
    f(bf16(M, 2 * K)[:, ::2], bf16(N, K), bf16(M, N))
    assert f.artifact.runs == 0
    assert f.last_route.kind == "reference"


def test_strict_raises_the_reason():
    f = faked(RESIDUAL_STATS, fallback="strict")
    with pytest.raises(CodaError, match="operand 'o' has rows that TMA cannot read"):
        f(bf16(M, 2 * K)[:, ::2], bf16(N, K), bf16(M, N))


def test_an_unknown_fallback():
    with pytest.raises(CodaError, match="fallback is 'never'"):
        coda.compile(BIAS_GELU, fallback="never")


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (M, 0, K), (M, N, 0)])
def test_empty_axes_launch_nothing(m, n, k):
    f = faked(RESIDUAL_STATS)
    h, s = f(bf16(m, k), bf16(n, k), bf16(m, n))
    assert (f.last_route.kind, f.artifact.runs) == ("empty", 0)
    assert h.shape == (m, n)
    assert s.shape == (m,)
    assert n or not s.any()


def test_a_failing_build_falls_back_once_and_is_remembered():
    calls = []

    def build(*args):
        calls.append(args)
        raise CodaError.of("no nvcc was found")

    f = CompiledProgram(program(BIAS_GELU), build=build, device_type="cpu")
    for _ in range(2):
        f(bf16(M, K), bf16(N, K))
    assert len(calls) == 1
    assert str(f.last_route) == "reference: no nvcc was found"
    strict = CompiledProgram(program(BIAS_GELU), build=build, device_type="cpu", fallback="strict")
    with pytest.raises(CodaError, match="no nvcc"):
        strict(bf16(M, K), bf16(N, K))


def test_the_artifact_is_built_once_at_first_use():
    built = []

    def build(p, dims, tile):
        built.append((dims, tile))
        return FakeArtifact(p)

    f = CompiledProgram(program(BIAS_GELU), {"N": N}, "128x192", build=build, device_type="cpu")
    assert not built
    f(bf16(M, K), bf16(N, K))
    f(bf16(M + 1, K), bf16(N, K))
    assert built == [({"M": M, "N": N, "K": K}, "128x192")]


def test_calls_alike_are_replayed():
    """The second call skips binding and checks; it must still see new values, new memory and new default scalars."""
    f = faked(RESIDUAL_STATS)
    shapes = ((2, 3, K), (8, K), (2, 3, 8))
    for _ in range(3):
        o, w, x = (bf16(*s) for s in shapes)
        h, s = f(o, w, x)
        want = evaluate(f.program, {"o": o.flatten(0, 1), "w": w, "x": x.flatten(0, 1)})
        assert torch.equal(h, want["h"].reshape(2, 3, 8))
        assert torch.equal(s, want["s"].reshape(2, 3))
    assert f.artifact.runs == 3
    assert len(f._accepted) == 1
    h2, _ = f(bf16(M, K), w, bf16(M, 8))  # another shape: looked at anew
    assert h2.shape == (M, 8)
    f.artifact.refuse = "the addresses are too far apart"
    f(*(bf16(*s) for s in shapes))
    assert str(f.last_route) == "reference: the addresses are too far apart"


# The package.


def test_dims_are_checked_against_the_operands():
    f = coda.compile(BIAS_GELU, N=8)
    with pytest.raises(CodaError, match="N = 8 was fixed by N=8"):
        f(bf16(M, K), bf16(N, K))


def test_eager_numerics_rounds_as_torch():
    x, w, bias = (torch.randint(-9, 10, s).bfloat16() for s in ((M, K), (N, K), (N,)))
    got = coda.compile(BIAS_GELU, numerics="eager")(x, w, bias)
    assert torch.equal(got, torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias), approximate="tanh"))
    with pytest.raises(CodaError, match="numerics is 'exact'"):
        coda.compile(BIAS_GELU, numerics="exact")


def test_compile_reads_text_paths_and_ir(tmp_path):
    path = tmp_path / "bias_gelu.coda"
    path.write_text(BIAS_GELU)
    x, w = bf16(M, K), bf16(N, K)
    results = [coda.compile(s)(x, w) for s in (BIAS_GELU, path, str(path), program(BIAS_GELU))]
    assert all(torch.equal(r, results[0]) for r in results)
    with pytest.raises(CodaError, match=r"cannot read nowhere\.coda"):
        coda.compile("nowhere.coda")


def test_a_text_with_several_programs_needs_a_choice():
    both = BIAS_GELU + ROW_SCALE
    with pytest.raises(CodaError, match=r"which program\? <string> has: bias_gelu, row_scale"):
        coda.compile(both)
    with pytest.raises(CodaError, match="there is no program 'row_scal'"):
        coda.compile(both, program="row_scal")
    assert coda.compile(both, program="row_scale").program.name == "row_scale"


def test_importing_coda_imports_neither_torch_nor_sympy():
    code = "import coda, sys; assert not {'torch', 'sympy', 'lark'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
