"""What real models and training loops do to a backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from coda.pytorch.graph import capture
from coda.pytorch.regions import find_regions
from tests.pytorch.handwritten import Titan
from tests.pytorch.models import agrees, compiled, gradients_agree, inputs, step, tiny

# L1, L4: shapes and graphs.


def test_l1_symbolic_from_the_start(reports):
    """dynamic=True makes numbers like eps symbolic in the first of two calls."""
    model = tiny("llama", torch.float32)
    call = compiled(model, dynamic=True)
    with torch.no_grad():
        for length in (7, 9, 16, 33):
            given = inputs("llama", torch.float32, 2, length)
            torch.testing.assert_close(call(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)
    assert len(reports) <= 2


@pytest.mark.parametrize("training", [True, False])
def test_l1_32_lengths_are_two_graphs_and_one_set_of_programs(training, reports):
    """What is built is keyed by the text of a program, which holds no length: in training forward and backward."""
    torch.manual_seed(0)
    model = Titan(layers=1)
    call = compiled(model)
    for length in range(33, 65):
        given = inputs("titan", torch.float32, 2, length)
        if not training:
            with torch.no_grad():
                torch.testing.assert_close(call(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)
            continue
        got, want = step(call, model, given), step(model, model, given)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-3, atol=1e-5)
    first, second = reports
    assert first.texts == second.texts and len(first.texts) == 2
    assert first.options == second.options


@pytest.mark.parametrize(("batch", "length"), [(1, 9), (1, 1), (3, 1)])
def test_one_row_or_one_sequence(batch, length):
    model, given = tiny("llama", torch.float32), inputs("llama", torch.float32, batch, length)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_l4_fullgraph(name):
    model, given = tiny(name, torch.bfloat16), inputs(name, torch.bfloat16)
    agrees(model, given, compiled(model, fullgraph=True))


@pytest.mark.slow
def test_inductor_runs_the_rest():
    model, given = tiny("llama", torch.float32), inputs("llama", torch.float32)
    agrees(model, given, compiled(model, inductor=True))


# Memory.


def test_a_view_of_a_matched_tensor_is_written(reports):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)

    def call(x):
        y = nn.functional.gelu(first(x))
        z = y.view(-1, 32)
        h = second(y)
        z.mul_(2)
        return h + y

    with torch.no_grad():
        x = torch.randn(4, 5, 32)
        torch.testing.assert_close(compiled(call)(x), call(x))
    assert "written in place" in str(reports[-1])


def test_an_input_and_a_buffer_are_written():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("scale", torch.ones(32))

        def forward(self, x):
            self.scale.add_(1)
            y = nn.functional.gelu(self.linear(x * self.scale))
            x.add_(1)
            return y + x

    model = Counter()
    twin = copy.deepcopy(model)
    a = torch.randn(4, 5, 32)
    b = a.clone()
    torch.testing.assert_close(compiled(twin)(b), model(a))
    assert torch.equal(a, b) and torch.equal(model.scale, twin.scale)


# Shapes of weights.


def test_a_square_weight_with_a_residual():
    model = nn.Linear(32, 32, bias=False)
    gradients_agree(lambda x: torch.relu(x + model(x)), torch.randn(4, 5, 32, requires_grad=True), model=model)


@pytest.mark.parametrize("turned", [True, False])
def test_functions_without_a_module(turned, reports):
    x, b = torch.randn(4, 32, requires_grad=True), torch.randn(48)
    w = torch.randn(*((48, 32) if turned else (32, 48)), requires_grad=True)
    gradients_agree(lambda x, w, b: nn.functional.gelu(x @ (w.T if turned else w) + b), x, w, b)
    assert ("@ w.T" in reports[-1].texts[0]) == turned


# What is refused, and how.


def test_one_of_several_results_is_no_operand():
    """A split of which one part goes to something that is not translated."""
    linear = nn.Linear(32, 48)

    def call(x):
        a, b, c = nn.functional.gelu(linear(x)).split(16, -1)
        return torch.relu(a) * b, c.sin()

    with torch.no_grad():
        x = torch.randn(4, 5, 32)
        for got, want in zip(compiled(call)(x), call(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("blamed", ["getitem", "split"])
def test_regions_without_part_of_a_split(blamed):
    """A barrier at one of several results: the operation and the others stay outside with it."""
    linear = nn.Linear(32, 48)
    found = []

    def backend(gm, examples):
        gm = capture(gm)
        barriers = [n for n in gm.graph.nodes if blamed in str(n.target)][:1]
        found.extend(find_regions(gm.graph, barriers))
        return gm

    def call(x):
        a, b, c = nn.functional.gelu(linear(x)).split(16, -1)
        return torch.relu(a) * b + c

    torch.compile(call, backend=backend)(torch.randn(4, 5, 32))
    (region,) = found
    assert all(isinstance(n.meta["val"], torch.Tensor) for n in region.nodes)


def test_f9_unknown_options_are_errors():
    model = nn.Linear(4, 4)
    with pytest.raises(Exception, match=r"(?s)no option 'numeric'.*did you mean 'numerics'"):
        compiled(model, numeric="eager")(torch.randn(2, 4))
    with pytest.raises(Exception, match=r"(?s)mode='fast'.*'reduce-overhead'"):
        compiled(model, mode="fast")(torch.randn(2, 4))
    with pytest.raises(Exception, match=r"(?s)numerics='fast'.*it is 'fused' or 'eager'"):
        compiled(model, numerics="fast")(torch.randn(2, 4))


def test_tune_is_how_the_kernels_of_a_graph_are_compiled(reports):
    from coda.pytorch.block import block
    from coda.pytorch.execute import steps

    for tune, mode in ((True, True), (False, "cached")):
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU()).bfloat16()
        compiled(model, tune=tune)(torch.randn(3, 16).bfloat16())
        it = block(reports[-1].texts[0], reports[-1].options[0])
        assert it.options.tune is tune
        (step,) = steps(it.forward, "copy", tune=tune)
        assert step.compiled.measured.mode == mode


def test_fallback_error_names_what_is_not_fused():
    with pytest.raises(Exception, match="nothing to fuse with it"):
        compiled(nn.Linear(4, 4), fallback="error")(torch.randn(2, 4))


def test_float64_is_left_alone(reports):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU()).double()
    x = torch.randn(3, 16).double()
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert not reports[-1].fused
