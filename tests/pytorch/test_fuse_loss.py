"""Option fuse_loss of the backend: a product and its cross entropy become one operation, which stores no logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda.errors import CodaError
from coda.pytorch.config import Config
from coda.pytorch.report import listening

M, V, K = 6, 100, 32


class Head(nn.Module):
    """A head and its loss, between which a model may put something."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda z: z, bias: bool = False, **options):
        super().__init__()
        self.head = nn.Linear(K, V, bias)
        self.between, self.options = between, options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.between(self.head(x))
        return F.cross_entropy(logits.view(-1, V), target.reshape(-1), **self.options)


def compiled(module: Callable, **options) -> Callable:
    torch._dynamo.reset()
    return torch.compile(module, backend="coda", fullgraph=True, options={"inductor": False, **options})


def operands(dtype: torch.dtype = torch.float32, ignored: int = -100) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(V, (2, M // 2))
    target[0, 1] = ignored
    return torch.randn(2, M // 2, K).to(dtype).requires_grad_(), target


def step(call: Callable, module: nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    loss = call(x, target)
    seed = torch.ones_like(loss)
    return [loss.detach(), *torch.autograd.grad(loss, (x, *module.parameters()), seed)]


CASES = {
    "plain": Head(),
    "float": Head(lambda z: z.float()),
    "bias, sum": Head(bias=True, reduction="sum"),
    "none": Head(reduction="none"),
    "smoothing, ignore": Head(label_smoothing=0.1, ignore_index=7),
    "weight": Head(weight=torch.rand(V) + 0.25),
    "softcap": Head(lambda z: torch.tanh(z / 2.5) * 2.5),
    "contiguous, flat": Head(lambda z: z.contiguous().flatten(0, 1)),
}


@pytest.mark.parametrize(("name", "memory"), [*((n, True) for n in CASES), ("plain", "low"), ("softcap", "low")])
def test_losses(name: str, memory: str | bool) -> None:
    module = CASES[name]
    x, target = operands(ignored=module.options.get("ignore_index", -100))
    want = step(module, module, x, target)
    with listening() as reports:
        got = step(compiled(module, fuse_loss=memory), module, x, target)
    (report,) = reports
    assert [str(line) for line in report.lines] == ["head: cross_entropy_loss"]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_tokens_that_predict_the_next() -> None:
    """Rows are cut as the logits would have been."""
    head = nn.Linear(K, V, bias=False)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        logits = head(x)[:, :-1, :].contiguous()
        return F.cross_entropy(logits.view(-1, V).float(), target[:, 1:].reshape(-1))

    x, target = operands()
    with listening() as reports:
        got = step(compiled(loss, fuse_loss=True), head, x, target)
    assert len(reports[0].fused) == 1
    for mine, theirs in zip(got, step(loss, head, x, target), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_loss_in_the_dtype_of_its_logits() -> None:
    module = Head().bfloat16()
    x, target = operands(torch.bfloat16)
    got = step(compiled(module, fuse_loss=True), module, x, target)
    want = step(module, module, x, target)
    assert got[0].dtype is want[0].dtype is torch.bfloat16
    torch.testing.assert_close(got[0], want[0])


KEPT = {
    "the model returns the logits": lambda z, target: (F.cross_entropy(z, target), z),
    "they are read twice": lambda z, target: F.cross_entropy(z, target) + z.square().mean(),
    "another function is between": lambda z, target: F.cross_entropy(z * 2, target),
    "targets are probabilities": lambda z, target: F.cross_entropy(z, F.one_hot(target, V).float()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_reads_the_logits_keeps_them(name: str) -> None:
    head, loss = nn.Linear(K, V), KEPT[name]
    x, target = torch.randn(M, K), torch.randint(V, (M,))
    call = lambda x, target: loss(head(x), target)  # noqa: E731
    with listening() as reports:
        got = compiled(call, fuse_loss=True)(x, target)
    assert not any("cross_entropy" in str(line) for line in reports[0].lines)
    torch.testing.assert_close(got, call(x, target))


def test_without_the_option_nothing_changes() -> None:
    module = CASES["plain"]
    with listening() as reports:
        compiled(module)(*operands())
    assert "cross_entropy" not in str(reports[0])
    with pytest.raises(CodaError, match=r"fuse_loss='much'.*\n.*False or True or 'fast' or 'low'"):
        Config.of({"fuse_loss": "much"})


@pytest.mark.parametrize(("family", "memory"), [("Llama", "fast"), ("Gemma2", "low")])
def test_models_nobody_changed(family: str, memory: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = getattr(transformers, f"{family}Config")(
        **sizes, num_key_value_heads=1, vocab_size=V, max_position_embeddings=64, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(V, (2, 12))

    def step(call: Callable[[], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        loss = call()
        loss.backward()
        return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    want = step(loss)
    with listening() as reports:
        got = step(compiled(loss, fuse_loss=memory))
    lines = [str(line) for report in reports for line in report.fused]
    assert [x for x in lines if "cross_entropy_loss" in x] == ["lm_head: cross_entropy_loss"]
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
