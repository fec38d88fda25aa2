"""A program in chunks of an axis is the program: by the interpreter, and as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coda.errors import CodaError
from coda.frontend import load
from coda.ir import Program
from coda.passes import derive
from coda.passes.chunk import Chunked, chunk
from coda.printer import print_program
from coda.runtime.inputs import random_inputs
from coda.runtime.reference import evaluate_sized
from coda.target.chunks import lower_along, lower_in_chunks
from coda.verify import verify
from tests.support import bf16

SIZES = {"M": 5, "V": 23, "D": 8}

LOSS = """
program loss(x: bf16[M, D], w: bf16[V, D], bias: f32[V]?, label: i64[M], cw: f32[V], cap: f32 = 3, part: f32 = 0.25) {
    z = softcap(x @ w.T + bias, cap)
    lse = logsumexp(z, V)
    hard = (lse - pick(z, V, label) + 0.5 * lse * lse) * pick(cw, V, label)
    soft = lse * sum(cw, V) - sum(cw * z, V)
    return nll = (1 - part) * hard + part * soft / size(V): f32
}
"""


def program(text: str) -> Program:
    return next(iter(load(text).programs.values()))


def in_chunks(
    cut: Chunked, inputs: dict[str, Any], sizes: dict[str, int], width: int, exact: bool
) -> dict[str, Tensor]:
    """The results of the program, one chunk after the other."""
    there = dict(inputs)
    for before in cut.before:
        there |= evaluate_sized(before, there, sizes, exact=exact)
    of = {p.name: p.type for p in cut.program.params} | {o.name: o.type for o in cut.program.outputs}
    dims = {name: of[whole].dims.index((cut.axis,)) for name, whole in cut.parts.items()}
    results: dict[str, list[Tensor]] = {}
    length = sizes[cut.axis.name]
    for start in range(0, length, width):
        count = min(width, length - start)
        given = there | {cut.start: start}
        for name, whole in cut.parts.items():
            if there.get(whole) is not None:
                given[name] = there[whole].narrow(dims[name], start, count)
        got = evaluate_sized(cut.body, given, sizes | {cut.part.name: count}, exact=exact)
        for output in cut.body.outputs:
            if output.name in cut.parts:
                results.setdefault(cut.parts[output.name], []).append(got[output.name])
            else:  # a sum
                there[output.name] = got[output.name]
    joined = {of_: torch.cat(pieces, next(dims[n] for n, w in cut.parts.items() if w == of_ and n in dims))
              for of_, pieces in results.items()}  # fmt: skip
    after = evaluate_sized(cut.after, there, sizes, exact=exact) if cut.after else {}
    return {o.name: (there | joined | after)[o.name] for o in cut.program.outputs}


def backward_of(text: str, wrt: tuple[str, ...]) -> tuple[Program, str | None]:
    backward, _ = derive(program(text), wrt, memory="low")
    return backward.backward, backward.chunk


@pytest.mark.parametrize("wrt", [("x", "w", "bias"), ("x",), ("w",), ("bias", "x")])
@pytest.mark.parametrize("width", [23, 8, 1])
def test_gradients_of_a_loss(wrt: tuple[str, ...], width: int) -> None:
    backward, axis = backward_of(LOSS, wrt)
    assert axis == "V"
    cut = chunk(backward, axis)
    for part in (*cut.before, cut.body, cut.after):
        if part is not None:
            verify(part)
    inputs = random_inputs(backward, SIZES, 0, "cpu")
    inputs["label"] = torch.tensor([0, 22, 7, 8, -100])
    inputs["lse"] = inputs["lse"].abs() + 3
    want = evaluate_sized(backward, inputs, SIZES, exact=True)
    got = in_chunks(cut, inputs, SIZES, width, exact=True)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)  # what is between the programs is f32


def test_an_absent_operand() -> None:
    backward, _ = backward_of(LOSS, ("x", "w"))
    inputs = random_inputs(backward, SIZES, 0, "cpu") | {"bias": None}
    inputs["label"] = torch.tensor([0, 22, 7, 8, -100])
    want = evaluate_sized(backward, inputs, SIZES, exact=True)
    got = in_chunks(chunk(backward, "V"), inputs, SIZES, 10, exact=True)
    torch.testing.assert_close(got["d_x"], want["d_x"], rtol=1e-5, atol=1e-7)  # what is between the programs is f32


@pytest.mark.parametrize("accumulate", [("w",), ("x", "w", "bias")])
def test_gradients_are_added_to_what_is_there(accumulate: tuple[str, ...]) -> None:
    derived, _ = derive(program(LOSS), ("x", "w", "bias"), memory="low", accumulate=accumulate)
    backward = derived.backward
    inputs = random_inputs(backward, SIZES, 0, "cpu")
    inputs["label"] = torch.tensor([0, 22, 7, 8, -100])
    want = evaluate_sized(backward, inputs, SIZES, exact=True)
    got = in_chunks(chunk(backward, "V"), inputs, SIZES, 10, exact=True)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    schedule = lower_in_chunks(backward, "V").schedule
    assert {a.name for a in schedule.args if a.inout} == {f"d_{name}" for name in accumulate}
    assert {p.of for p in schedule.loop.parts} >= {"d_w", "d_bias"}


def test_h7_sums_over_chunks_are_f32() -> None:
    """Twenty-three chunks of one class: bf16 sums would lose the small ones."""
    text = "program p(z: bf16[M, V], w: bf16[V, D]) { return z @ w: bf16 }"
    cut = chunk(program(text), "V")
    z, w = torch.ones(1, 300).bfloat16(), torch.full((300, 8), 2.0**-8).bfloat16()
    w[0] = 1.0
    sizes = {"M": 1, "V": 300, "D": 8}
    got = in_chunks(cut, {"z": z, "w": w}, sizes, 1, exact=False)["out"]
    torch.testing.assert_close(got.float(), torch.full((1, 8), 1 + 299 / 256).bfloat16().float(), rtol=0, atol=0)
    assert [p.type.dtype.name for p in cut.body.params if p.inout] == ["f32"]


def test_the_body_reads_as_a_program() -> None:
    backward, _ = backward_of(
        """program ce(x: bf16[M, D], w: bf16[V, D], label: i64[M]) {
            z = x @ w.T
            return nll = logsumexp(z, V) - pick(z, V, label): f32
        }""",
        ("x", "w"),
    )
    cut = chunk(backward, "V")
    assert print_program(cut.body) == (
        "program ce_backward_chunk(x: bf16[M, D], w_chunk: bf16[V_chunk, D], label: i64[M], lse: f32[M], "
        "d_nll: f32[M],\n"
        "                          shared: f32[M], V_start: i64, inout d_x_sum: f32[M, D]) {\n"
        "    z = x @ w_chunk.T\n"
        "    t1 = where(label - V_start == index(V_chunk), shared, 0.0) + d_nll * exp(z - lse)\n"
        "    d_z = cast(t1, bf16)\n"
        "    acc1 = d_z @ w_chunk\n"
        "    acc2 = d_z.T @ x\n"
        "    d_x_sum += acc1\n"
        "    return d_w_chunk = cast(acc2, bf16): bf16[V_chunk, D]\n"
        "}\n"
    )
    assert str(cut.notes[0].label) == "algebraic (sums over 'V' are added up in f32, chunk by chunk)"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return logsumexp(x @ w.T, V): f32", "'logsumexp' over 'V' takes all of it at once"),
        ("z = x @ w.T; return z - sum(z, V): f32", "a sum over 'V' is used over 'V' again"),
        ("z = x @ w.T; return z: bf16[(M V)]", "'V' shares a dim of bf16[(M V)] with other axes"),
    ],
)
def test_what_needs_the_whole_axis_is_refused(body: str, message: str) -> None:
    p = program(f"program p(x: bf16[M, D], w: bf16[V, D]) {{ {body} }}")
    with pytest.raises(CodaError, match="so it is not computed in chunks") as error:
        chunk(p, "V")
    assert message in str(error.value)


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(CodaError, match="has no axis 'W'"):
        chunk(program(LOSS), "W")


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        (LOSS, "V"),
        ("program p(x: bf16[M, D], w: bf16[F, D], v: bf16[D2, F]) { return silu(x @ w.T) @ v.T: bf16 }", None),
        ("program p(x: bf16[M, D], w: bf16[F, D]) { z = x @ w.T; return z: bf16, sum(z * z, F): f32 }", None),
        ("program p(x: bf16[M, D], w: bf16[F, D]) { z = x @ w.T; return sum(z * z, F): f32 }", "F"),
    ],
)
def test_the_axis_is_that_of_a_product_which_is_never_stored(text: str, axis: str | None) -> None:
    assert derive(program(text), memory="low")[0].chunk == axis


def test_a_gradient_that_lacks_the_axis_is_not_cut() -> None:
    text = "program p(x: bf16[M, D], w: bf16[V, D], t: f32[M]) { return t * logsumexp(x @ w.T, V): f32 }"
    assert derive(program(text), ("t",), memory="low")[0].chunk is None
    assert derive(program(text), ("t", "x"), memory="low")[0].chunk == "V"


def test_inputs_are_not_changed() -> None:
    backward, _ = backward_of(LOSS, ("x", "w"))
    inputs = random_inputs(backward, SIZES, 0, "cpu") | {"x": bf16(5, 8)}
    inputs["label"] = torch.tensor([0, 22, 7, 8, -100])
    before = {n: x.clone() for n, x in inputs.items() if isinstance(x, Tensor)}
    in_chunks(chunk(backward, "V"), inputs, SIZES, 10, exact=False)
    assert all(torch.equal(inputs[n], x) for n, x in before.items())


HEAD = """
program head(o: bf16[M, A=8], x: bf16[M, D=8], w_o: bf16[D, A], g: bf16[D], w: bf16[V=40, D]) {
    h = cast(x + o @ w_o.T, bf16)
    return logits = rms_norm(h, g, 1e-5) @ w.T: bf16
}
"""


def test_a_backward_that_contracts_a_very_long_axis_is_cut_along_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits that are returned, too: with what is derived from the sums behind the last chunk."""
    assert derive(program(HEAD))[0].chunk is None
    monkeypatch.setattr("coda.passes.chunk.LONG", 32)
    derived = derive(program(HEAD))[0]
    assert derived.chunk == "V"
    cut = chunk(derived.backward, "V")
    for part in (*cut.before, cut.body, cut.after):
        if part is not None:
            verify(part)
    assert any(n.op == "dot" for n in cut.after.nodes()) if cut.after else False
    inputs = random_inputs(derived.backward, {"M": 5}, 0, "cpu")
    sizes = {"M": 5, "V": 40, "D": 8, "A": 8}
    want = evaluate_sized(derived.backward, inputs, sizes, exact=True)
    for width in (40, 16, 7):
        got = in_chunks(cut, inputs, sizes, width, exact=True)
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    schedule = lower_in_chunks(derived.backward, "V").schedule
    assert schedule.loop is not None and schedule.loop.axis.name == "V"


def test_rows_that_are_a_group_stay_together() -> None:
    """Nobody can tell B and T of ``(B T)`` where no argument has them apart: the zeros that sums begin with are over
    one loop. Llama's head, compiled for all numbers of tokens, ran in the interpreter."""
    text = """
    program head(dy: bf16[(B T), V], w: bf16[V, D], x: bf16[(B T), D]) {
        return dx = dy @ w: bf16, dw = dy.T @ x: bf16
    }
    """
    assert lower_along(program(text), "V").schedule.loop is not None
