"""coda.nn.functional.linear_cross_entropy and its module, in both memory modes, against torch in float64."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda.errors import CodaError
from coda.nn import LinearCrossEntropy
from coda.nn.functional import linear_cross_entropy

M, V, K = 9, 50, 32
MODES = ["fast", "low"]
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 2.0**-7},
    "softcap": {"softcap": 2.5},
    "bias": {"bias": True},
    "class_weight": {"class_weight": True},
    "token_weight": {"token_weight": True},
    "class_weight, smoothing": {"class_weight": True, "label_smoothing": 0.25},
    "all": {"bias": True, "class_weight": True, "token_weight": True, "label_smoothing": 0.1, "z_loss": 0.01,
            "softcap": 2.5},
}  # fmt: skip
TENSORS = {"bias": (V,), "class_weight": (V,), "token_weight": (M,)}


def labels(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, 7, -100, V - 1, 7, 7, 23, -100, 1], dtype=dtype)


def operands(options: dict, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict]:
    """(x, weight and the tensors asked for, the other options)"""
    torch.manual_seed(0)
    tensors = {"x": torch.randn(M, K).to(dtype), "weight": (torch.randn(V, K) / 4).to(dtype)}
    for name in (n for n in TENSORS if n in options):
        tensors[name] = torch.rand(TENSORS[name]) + 0.25
    if "bias" in options:
        tensors["bias"] = tensors["bias"].to(dtype)
    return tensors, {n: o for n, o in options.items() if n not in TENSORS}


def by_torch(tensors: dict[str, Tensor], target: Tensor, reduction: str, **options) -> Tensor:
    """The same by torch; logits have the dtype of the operands, the loss is at least f32."""
    z = F.linear(tensors["x"], tensors["weight"], tensors.get("bias"))
    z = z if z.dtype == torch.float64 else z.float()
    if cap := options.get("softcap"):
        z = cap * (z / cap).tanh()
    weight, target = tensors.get("class_weight"), target.long()
    weight = None if weight is None else weight.detach().to(z.dtype)
    rows = F.cross_entropy(
        z, target, weight, reduction="none", label_smoothing=options.get("label_smoothing", 0.0)
    ) + options.get("z_loss", 0.0) * (z.logsumexp(1) ** 2) * (target != -100)
    if "token_weight" in tensors:
        rows = rows * tensors["token_weight"]
    counted = (target != -100).to(z.dtype)
    if weight is not None:
        counted = counted * weight[target.clamp(min=0)]
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.sum() / counted.sum()


def differentiated(function, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The loss and the gradients of all but the class weights, for random gradients of the loss."""
    leaves = {n: (t if dtype is None else t.to(dtype)).detach().clone() for n, t in tensors.items()}
    wanting = [leaves[n].requires_grad_() for n in leaves if n != "class_weight"]
    loss = function(leaves)
    seed = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
    return [loss.detach(), *torch.autograd.grad(loss, wanting, seed.to(loss))]


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize(
    ("reduction", "dtype"), [("none", torch.bfloat16), ("sum", torch.float32), ("mean", torch.bfloat16)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_value_and_every_gradient(name: str, reduction: str, dtype: torch.dtype, memory: str) -> None:
    tensors, options = operands(OPTIONS[name], dtype)
    target = labels(torch.int32 if name == "plain" else torch.int64)
    before = {n: t.clone() for n, t in tensors.items()}

    def ours(leaves):
        x, weight, *_ = leaves.values()
        more = {n: t for n, t in leaves.items() if n in TENSORS}
        return linear_cross_entropy(x, weight, target, **more, reduction=reduction, memory=memory, **options)

    got = differentiated(ours, tensors)
    eager = differentiated(lambda t: by_torch(t, target, reduction, **options), tensors)
    exact = differentiated(lambda t: by_torch(t, target, reduction, **options), tensors, torch.float64)
    assert got[0].dtype is torch.float32
    for mine, torchs, want in zip(got, eager, exact, strict=True):
        assert mine.shape == want.shape
        # the yardstick is torch's error; where it happens to be smaller, a rounding of what is stored
        bound = 2 * (torchs.double() - want).norm() + torch.finfo(mine.dtype).eps * want.norm()
        assert (mine.double() - want).norm() <= bound
    assert all(torch.equal(tensors[n], x) for n, x in before.items())


@pytest.mark.parametrize("memory", MODES)
def test_gradients_of_predictions_that_are_right(memory: str) -> None:
    """Where the label's probability is nearly 1 its gradient is a small difference: the log-sum-exp and the logit in it
    must have the same rounding."""
    torch.manual_seed(0)
    w = torch.randn(V, K)
    target = torch.arange(M)
    x = 20 * torch.nn.functional.normalize(w[:M])
    tensors = {"x": x.bfloat16(), "weight": torch.nn.functional.normalize(w).bfloat16()}
    got = differentiated(lambda t: linear_cross_entropy(t["x"], t["weight"], target, memory=memory), tensors)
    eager = differentiated(lambda t: by_torch(t, target, "mean"), tensors)
    exact = differentiated(lambda t: by_torch(t, target, "mean"), tensors, torch.float64)
    assert exact[0] < 0.05
    for mine, torchs, want in zip(got, eager, exact, strict=True):
        assert (mine.double() - want).norm() <= 2 * (torchs.double() - want).norm()


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}])
def test_h2_all_labels_ignored(options: dict) -> None:
    """The mean of nothing is NaN, as torch gives it; none of it reaches a gradient."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    target = torch.full((4,), -100)
    assert F.cross_entropy(x @ w.T, target).isnan()
    for memory in MODES:
        loss = linear_cross_entropy(x, w, target, memory=memory, **options)
        assert loss.isnan()
        assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(loss, (x, w)))
        assert linear_cross_entropy(x, w, target, reduction="sum", memory=memory, **options) == 0


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("label", [50, -5, 1 << 40])
def test_h6_a_label_that_is_no_class(label: int, memory: str) -> None:
    tensors, _ = operands({}, torch.float32)
    x, w = tensors["x"].requires_grad_(), tensors["weight"]
    target = labels()
    target[1] = label
    loss = linear_cross_entropy(x, w, target, reduction="none", memory=memory)
    assert loss.isnan().nonzero().flatten().tolist() == [1]
    (grad,) = torch.autograd.grad(loss.nan_to_num().sum(), x)
    assert grad.isfinite().all() and not grad[1].any()
    with pytest.raises(CodaError, match=rf"target of row 1 is {label}, which is none of 50 classes\n.*labelled -100"):
        linear_cross_entropy(x, w, target, memory=memory, check_labels=True)
    assert linear_cross_entropy(x, w, labels(), memory=memory, check_labels=True).isfinite()


@pytest.mark.parametrize("memory", MODES)
def test_i1_a_second_backward_gives_the_same_bits(memory: str) -> None:
    tensors, _ = operands({}, torch.bfloat16)
    x, w = (tensors[n].requires_grad_() for n in ("x", "weight"))
    loss = linear_cross_entropy(x, w, labels(), memory=memory)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("memory", MODES)
def test_i4_gradients_that_are_not_wanted(memory: str) -> None:
    tensors, _ = operands({}, torch.float32)
    target = labels()
    x, w = tensors["x"], tensors["weight"]
    want = {}
    for wanting in itertools.product([False, True], repeat=2):
        leaves = [t.clone().requires_grad_(r) for t, r in zip((x, w), wanting, strict=True)]
        loss = linear_cross_entropy(*leaves, target, memory=memory)
        assert loss.requires_grad == any(wanting)
        asked = [i for i, r in enumerate(wanting) if r]
        for i, g in zip(asked, torch.autograd.grad(loss, [leaves[i] for i in asked]) if asked else (), strict=True):
            want.setdefault(i, g)
            assert torch.equal(g, want[i])


def test_leading_dims_and_no_rows() -> None:
    x, w = torch.randn(2, 3, K, requires_grad=True), torch.randn(V, K)
    target = torch.tensor([[0, -100, 3], [4, 5, V - 1]])
    flat = linear_cross_entropy(x.view(6, K), w, target.view(6), reduction="none")
    assert torch.equal(linear_cross_entropy(x, w, target, reduction="none"), flat.view(2, 3))
    empty = linear_cross_entropy(x[:0], w, target[:0])
    assert empty.isnan() and F.cross_entropy(torch.randn(0, V), torch.zeros(0, dtype=torch.int64)).isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"memory": "auto"}, "memory is 'auto'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"target": torch.zeros(M)}, "the target is torch.float32"),
        ({"target": torch.zeros(M, 1, dtype=torch.int64)}, r"the target has shape \[9, 1\], the rows of x \[9\]"),
        ({"bias": torch.zeros(V + 1)}, r"'bias' has shape \[51\], expected \[50\]"),
        ({"bias": torch.zeros(V).bfloat16()}, "'bias' is torch.bfloat16, the operand torch.float32"),
        ({"class_weight": torch.zeros(1)}, r"'class_weight' has shape \[1\], expected \[50\]"),
        ({"token_weight": torch.zeros(M, 2)}, r"'token_weight' has shape \[18\], expected \[9\]"),
    ],
)
def test_what_does_not_fit_is_told(change: dict, message: str) -> None:
    given = {"x": torch.randn(M, K), "weight": torch.randn(V, K), "target": labels()} | change
    with pytest.raises(CodaError, match=message):
        linear_cross_entropy(**given)


# -- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MODES)
def test_module(memory: str) -> None:
    torch.manual_seed(0)
    module = LinearCrossEntropy(K, V, bias=True, label_smoothing=0.1, memory=memory)
    x = torch.randn(M, K, requires_grad=True)
    loss = module(x, labels())
    want = F.cross_entropy(F.linear(x, module.weight, module.bias), labels(), label_smoothing=0.1)
    torch.testing.assert_close(loss, want)
    leaves = (x, *module.parameters())
    for got, expected in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(got, expected)
    options = f"label_smoothing=0.1, memory='{memory}'"
    assert repr(module) == f"LinearCrossEntropy(in_features=32, classes=50, bias=True, {options})"


def test_module_on_a_tied_weight() -> None:
    embedding, head = nn.Embedding(V, K), nn.Linear(K, V, bias=False)
    head.weight = embedding.weight
    module = LinearCrossEntropy.of(head, reduction="sum")
    assert module.weight is embedding.weight and module.bias is None
    module(embedding(torch.arange(M)), labels()).backward()
    assert embedding.weight.grad is not None


def test_options_of_the_module_are_checked_when_it_is_made() -> None:
    with pytest.raises(CodaError, match="there is no option smoothing"):
        LinearCrossEntropy(K, V, smoothing=0.1)
    with pytest.raises(CodaError, match="reduction is 'max'"):
        LinearCrossEntropy(K, V, reduction="max")


def test_the_module_can_be_imported_first() -> None:
    """Before ``coda.pytorch``, which uses it, and which it is made of."""
    subprocess.run([sys.executable, "-c", "import coda.nn"], check=True)


def test_inside_torch_compile() -> None:
    module = LinearCrossEntropy(K, V, z_loss=0.01, memory="low")
    x = torch.randn(M, K, requires_grad=True)
    compiled = torch.compile(lambda x: module(x, labels()) * 2, backend="aot_eager", fullgraph=True)
    want = module(x, labels()) * 2
    got = compiled(x)
    torch.testing.assert_close(got, want)
    leaves = (x, module.weight)
    for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(a, b)
