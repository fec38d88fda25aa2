"""linear_cross_entropy on the device, forward and backward, in both memory modes: against float64, ragged and real
vocabularies, equal bits over runs, memory at Llama's size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from coda.nn.functional import linear_cross_entropy
from coda.nn.loss import program_text
from coda.pytorch.block import Options, block
from coda.pytorch.execute import Step, steps
from coda.target.chunks import NARROW, WIDE
from tests.pytorch.test_linear_cross_entropy import TENSORS, by_torch, differentiated
from tests.support import same_bits

pytestmark = pytest.mark.gpu
MODES = ("fast", "low")
ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.5}
SHAPES = ((7, 11, 64), (129, 1000, 264), (300, 2 * WIDE + 105, 72))  # M, V, K; the last has three wide chunks, V is odd
VOCABULARIES = (50257, 128256, 151936, 262144)


def operands(m: int, v: int, k: int, every: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors and labels: inside, at both ends of the axis, ignored."""
    torch.manual_seed(m + v)
    x, w = torch.randn(m, k, device="cuda"), torch.randn(v, k, device="cuda") * k**-0.5
    tensors = {"x": x.bfloat16(), "weight": w.bfloat16()}
    if every:
        tensors["bias"] = torch.randn(v, device="cuda").bfloat16()
        tensors["class_weight"] = torch.rand(v, device="cuda") + 0.25
        tensors["token_weight"] = torch.rand(m, device="cuda") + 0.25
    target = torch.randint(v, (m,), device="cuda")
    target[::5], target[1::7], target[2::7] = -100, v - 1, 0
    return tensors, target


def ours(leaves: dict[str, Tensor], target: Tensor, **options) -> Tensor:
    more = {n: t for n, t in leaves.items() if n in TENSORS}
    return linear_cross_entropy(leaves["x"], leaves["weight"], target, **more, **options)


def check(tensors: dict[str, Tensor], target: Tensor, memory: str, **options) -> None:
    """Loss and gradients are within twice eager's error; operands stay as they are."""
    before = {n: t.clone() for n, t in tensors.items()}
    got = seeded(lambda t: ours(t, target, memory=memory, **options), tensors)
    eager = seeded(lambda t: by_torch(t, target, "mean", **options), tensors)
    exact = seeded(lambda t: by_torch(t, target, "mean", **options), tensors, torch.float64)
    for mine, torchs, want in zip(got, eager, exact, strict=True):
        bound = 2 * (torchs.double() - want).norm() + torch.finfo(mine.dtype).eps * want.norm()
        assert (mine.double() - want).norm() <= bound
    assert all(torch.equal(tensors[n], x) for n, x in before.items())


def seeded(function, tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """As ``differentiated``, with the memory that results will get full of NaN."""
    poison = [torch.full_like(t, float("nan")) for t in tensors.values() if t.is_floating_point()]
    del poison
    return differentiated(function, tensors, dtype)


def kernels(memory: str, every: bool) -> Iterator[Step]:
    """What the calls above ran as."""
    bf16, f32, i64 = torch.bfloat16, torch.float32, torch.int64
    dtypes, options, wrt = (("x", bf16), ("w", bf16), ("target", i64)), (0.0, 0.0, None), ("x", "w")
    if every:
        dtypes += (("bias", bf16), ("class_weight", f32), ("all_classes", f32), ("token_weight", f32))
        options, wrt = (0.1, 0.01, 2.5), ("x", "w", "bias", "token_weight")
    text = program_text(dtypes, -100, "mean", *options)
    it = block(text, Options(sizes=("M", "K", "V"), wrt=wrt, memory=memory).text())
    assert it.gradients is not None
    yield from steps(it.forward, "copy")
    yield from steps(it.backward(wrt)[0], "copy", it.gradients.chunk)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("every", [False, True], ids=["plain", "all"])
def test_values_and_gradients(every: bool, memory: str) -> None:
    for shape in SHAPES:
        tensors, target = operands(*shape, every)
        check(tensors, target, memory, **(ALL if every else {}))
        for step in kernels(memory, every):
            assert step.reason is None and step.compiled is not None
            assert step.compiled.last_route is not None and step.compiled.last_route.kind == "kernel"


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_h9_real_vocabularies(vocabulary: int, memory: str) -> None:
    check(*operands(512, vocabulary, 256), memory)


@pytest.mark.parametrize("memory", MODES)
def test_equal_bits_over_runs(memory: str) -> None:
    tensors, target = operands(300, 2 * WIDE + 105, 72)
    first = seeded(lambda t: ours(t, target, memory=memory), tensors)
    for _ in range(20):
        again = seeded(lambda t: ours(t, target, memory=memory), tensors)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("memory", MODES)
def test_h2_h6_labels_that_count_for_nothing_or_are_none(memory: str) -> None:
    tensors, target = operands(200, WIDE + 9, 64)
    x, w = (tensors[n].requires_grad_() for n in ("x", "weight"))
    loss = linear_cross_entropy(x, w, torch.full_like(target, -100), memory=memory)
    assert loss.isnan()
    assert all(not g.any() for g in torch.autograd.grad(loss, (x, w)))  # NaN counts as true
    for label in (WIDE + 9, -5, 1 << 40):
        target[3] = label
        loss = linear_cross_entropy(x, w, target, reduction="none", memory=memory)
        assert loss.isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("memory", MODES)
def test_i1_a_second_backward(memory: str) -> None:
    tensors, target = operands(129, 1000, 264)
    x, w = (tensors[n].requires_grad_() for n in ("x", "weight"))
    loss = linear_cross_entropy(x, w, target, memory=memory)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(loss, (x, w))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("memory", MODES)
def test_forward_and_backward_in_a_cuda_graph(memory: str) -> None:
    tensors, target = operands(300, 2 * WIDE + 105, 72)
    x, w = (tensors[n].requires_grad_() for n in ("x", "weight"))

    def step() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x, w, target, memory=memory)
        return loss.detach(), *torch.autograd.grad(loss, (x, w))

    stream = torch.cuda.Stream()  # autograd keeps to the stream of the first call
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for value in got:
        value.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("memory", MODES)
def test_fuse_loss_of_the_backend(memory: str) -> None:
    """A compiled model with its loss has the kernels of the function."""
    tensors, target = operands(129, 1000, 264)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w).float(), target)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="coda", options={"fuse_loss": memory})
    got = seeded(lambda t: compiled(t["x"], t["weight"]), tensors)
    want = seeded(lambda t: ours(t, target, memory=memory), tensors)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def peak(call) -> int:
    """Bytes beyond what is there before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 << 30,
    reason="float64 logits of Llama-3's vocabulary want 100 GB",
)
def test_llama() -> None:
    """Llama-3-8B's head at 8192 tokens: values, and what a step needs of memory beyond its operands."""
    m, v, k = 8192, 128256, 4096
    tensors, target = operands(m, v, k)
    gradients, slack = 2 * (m * k + v * k), 64 << 20
    logits, sum_of_dx = 2 * m * v, 4 * m * k
    least = gradients + sum_of_dx + slack
    most = {"fast": least + logits + 2 * m * WIDE, "low": least + 2 * m * NARROW}
    for memory in MODES:
        check(tensors, target, memory)
        torch.cuda.empty_cache()
        x, w = (tensors[n].detach().requires_grad_() for n in ("x", "weight"))

        def step(x: Tensor = x, w: Tensor = w, memory: str = memory) -> tuple[Tensor, ...]:
            return torch.autograd.grad(linear_cross_entropy(x, w, target, memory=memory), (x, w))

        assert peak(step) <= most[memory]
    with torch.no_grad():
        assert peak(lambda: linear_cross_entropy(tensors["x"], tensors["weight"], target)) <= 128 << 20
