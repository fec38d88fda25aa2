"""The custom op: what torch asks of one, and gradients for every subset of operands."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from coda.errors import CodaError
from coda.nn.loss import program_text
from coda.pytorch.block import Options, block
from coda.pytorch.op import BLOCK
from coda.runtime.binding import type_shape

TEXT = """
program p(x: f32[(B T), D=16], g: f32[D], w: f32[F=24, D], v: f32[D, F], h: f32[(B T), D]) {
    n = rms_norm(x, g, 1e-6)
    return y = h + silu(n @ w.T) @ v.T: f32[(B T), D], z = n @ w.T: f32[(B T), F]
}
"""
NAMES = ("x", "g", "w", "v", "h")
SHAPES = {"y": (("B",), ("T",), ("D",))}


def options(wrt=NAMES, **more) -> str:
    return Options(sizes=("B", "T"), wrt=wrt, shapes=SHAPES, **more).text()


def operands(batch=2, length=3, wanting=NAMES):
    torch.manual_seed(0)
    shapes = {"x": (batch, length, 16), "g": (16,), "w": (24, 16), "v": (16, 24), "h": (batch, length, 16)}
    return [torch.randn(s).requires_grad_(n in wanting) for n, s in shapes.items()]


def eager(x, g, w, v, h):
    n = torch.nn.functional.rms_norm(x, (16,), g, 1e-6)
    z = n @ w.T
    return h + torch.nn.functional.silu(z) @ v.T, z.flatten(0, 1)


def strided(how, tensors):
    """The operands with other strides."""
    change = {
        "contiguous": lambda x: x,
        "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        "padded": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        "expanded": lambda x: x[:1].expand(x.shape),
    }[how]
    return [change(x.detach()).requires_grad_(x.requires_grad) for x in tensors]


@pytest.mark.parametrize("how", ["contiguous", "transposed", "padded", "expanded"])
def test_l2_opcheck(how):
    """Case A7 as well: eager, fake and compiled take the same layouts."""
    torch.library.opcheck(BLOCK, (strided(how, operands()), [2, 3], TEXT, options()))


@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (1, 1)])
def test_l2_opcheck_of_empty_and_tiny(batch, length):
    torch.library.opcheck(BLOCK, (operands(batch, length), [batch, length], TEXT, options()))


LOSS = program_text((("x", torch.float32), ("w", torch.float32), ("target", torch.int64)), -100, "mean", 0.1, 0, None)
TABLE = """program p(x: f32[(B T), D=16], w: f32[F=24, D], cos: f32[P=8, F], pos: i64[(B T)], eps: f32) {
    return y = (x @ w.T) * cos[pos] + eps: f32
}"""


def of_other_kinds(name: str, how: str) -> tuple:
    """Arguments of the op for the other programs that it runs: a loss over labels, tables with positions and a number,
    and a derived backward."""
    if name == "backward":
        it = block(TEXT, options())
        whole, text, given = it.backward(NAMES)
        shapes = {n: type_shape(whole.param(n).type, {"B": 2, "T": 3}) for n in (p.name for p in whole.params)}
        return strided(how, [torch.randn(shape) for shape in shapes.values()]), [2, 3], text, given
    if name == "table":
        x, w, cos = (torch.randn(s, requires_grad=s != (8, 24)) for s in ((2, 3, 16), (24, 16), (8, 24)))
        tensors = [*strided(how, [x, w, cos]), torch.arange(6), torch.tensor(0.5)]
        return tensors, [2, 3], TABLE, Options(("B", "T"), ("x", "w")).text()
    x, w = torch.randn(6, 16, requires_grad=True), torch.randn(10, 16, requires_grad=True)
    how_it_runs = Options(("M", "K", "V"), ("x", "w"), memory=name.removeprefix("loss_")).text()
    return [*strided(how, [x, w]), torch.arange(6)], [6, 16, 10], LOSS, how_it_runs


@pytest.mark.parametrize("how", ["contiguous", "transposed", "padded", "expanded"])
@pytest.mark.parametrize("name", ["loss_fast", "loss_low", "table", "backward"])
def test_l2_opcheck_of_other_kinds_of_programs(name, how):
    torch.library.opcheck(BLOCK, of_other_kinds(name, how))


def test_l2_opcheck_without_gradients():
    torch.library.opcheck(BLOCK, ([x.detach() for x in operands()], [2, 3], TEXT, options(wrt=())))


def test_b1_no_rows():
    tensors = operands(batch=0)
    y, z, *_ = BLOCK(tensors, [0, 3], TEXT, options())
    assert y.shape == (0, 3, 16) and z.shape == (0, 24)
    gradients = torch.autograd.grad(y.sum() + z.sum(), tensors)
    assert all(not g.any() and g.shape == x.shape for g, x in zip(gradients, tensors, strict=True))


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])  # an unused output has no gradient
@pytest.mark.parametrize("wanting", [c for c in product((False, True), repeat=5) if any(c)])
def test_i4_every_subset_of_gradients(wanting, outputs):
    names = tuple(n for n, w in zip(NAMES, wanting, strict=True) if w)
    tensors = operands(wanting=names)
    got, want = BLOCK(tensors, [2, 3], TEXT, options(names)), eager(*tensors)
    used = [i for i in outputs if want[i].requires_grad]
    if not used:
        return
    seeds, leaves = [torch.randn_like(want[i]) for i in used], [x for x in tensors if x.requires_grad]
    ours, theirs = (
        torch.autograd.grad([r[i] for i in used], leaves, seeds, allow_unused=True, materialize_grads=True)
        for r in (got, want)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_was_not_asked_for_has_no_silent_gradient():
    y, *_ = BLOCK(operands(), [2, 3], TEXT, options(wrt=()))
    with pytest.raises(CodaError, match="without its derivative"):
        y.sum().backward()


def test_a_graph_of_another_version_is_refused():
    text = options().replace(Options().version, "0.0.1")
    with pytest.raises(CodaError, match=r"made by coda 0\.0\.1.*\n.*compile the model again"):
        BLOCK(operands(), [2, 3], TEXT, text)
