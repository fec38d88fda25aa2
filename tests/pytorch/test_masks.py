"""Attention masks that need no tensor, and those that stay."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from sympy import Dummy, Integer
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

import coda
from coda.pytorch import backend
from coda.pytorch.elements import Elements, Region
from coda.pytorch.masks import ATTENTION, CAUSAL, NOTHING, TENSOR, without_masks
from tests.pytorch.models import agrees, compiled, inputs, tf, tiny

LENGTH = 12
INF = float("inf")


@pytest.fixture
def compiling(reports, monkeypatch):
    """Compiles by the backend, and keeps the attentions of all graphs: (has a mask, is causal)."""
    attentions = []

    def keeping(gm, *how):
        graphs = [gm, *(m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm)]
        for node in (n for g in graphs for n in g.graph.find_nodes(op="call_function", target=ATTENTION)):
            given = dict(enumerate(node.args)) | node.kwargs
            attentions.append((given.get(3) is not None or "attn_mask" in node.kwargs, bool(given.get(5))))
        return compile_(gm, *how)

    compile_ = backend.compile_without_autocast
    monkeypatch.setattr(backend, "compile_without_autocast", keeping)

    def compile(call, **options):
        return compiled(call, **options)

    compile.attentions = attentions
    compile.masks = lambda: [mask for r in reports for mask in r.masks]
    return compile


@pytest.fixture
def traced(monkeypatch):
    """transformers writes every mask out, as it does under torch.compile in some versions."""
    from transformers import masking_utils

    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        monkeypatch.setattr(masking_utils, name, lambda *args, **kwargs: False)


def gemma3(window: int) -> nn.Module:
    """One layer with a window, one without."""
    torch.manual_seed(0)
    config = tf.Gemma3TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=window,
        layer_types=["sliding_attention", "full_attention"], attn_implementation="sdpa",
    )  # fmt: skip
    return tf.Gemma3ForCausalLM(config)


def mistral(window: int) -> nn.Module:
    model = tiny("mistral", torch.float32)
    model.config.sliding_window = window
    return model


def without_labels(name: str) -> dict[str, torch.Tensor]:
    return {k: v for k, v in inputs(name, torch.float32).items() if k != "labels"}


def same_logits(model: nn.Module, call, **given) -> None:
    with torch.no_grad():
        torch.testing.assert_close(call(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-4)


# Models.

MODELS = {
    "llama": (lambda: tiny("llama", torch.float32), [CAUSAL, CAUSAL]),
    "qwen3": (lambda: tiny("qwen3", torch.float32), [CAUSAL, CAUSAL]),
    "gpt2": (lambda: tiny("gpt2", torch.float32), [CAUSAL, CAUSAL]),
    "bert": (lambda: tiny("bert", torch.float32), [NOTHING, NOTHING]),
    "vit": (lambda: tiny("vit", torch.float32), [NOTHING, NOTHING]),
    "window_of_11": (lambda: mistral(LENGTH - 1), [TENSOR, TENSOR]),
    "window_of_12": (lambda: mistral(LENGTH), [CAUSAL, CAUSAL]),
    "windows_of_4": (lambda: gemma3(4), [TENSOR, CAUSAL]),
    "windows_of_64": (lambda: gemma3(64), [CAUSAL, CAUSAL]),
}
MEANS = {CAUSAL: (False, True), NOTHING: (False, False), TENSOR: (True, False)}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, compiling, traced):
    build, want = MODELS[name]
    model = build().eval()
    same_logits(model, compiling(model), **without_labels(name))
    assert compiling.masks() == want
    assert compiling.attentions == [MEANS[m] for m in want]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_sizes_and_caches(dynamic, use_cache, compiling, traced):
    """Without a cache transformers looks for packed sequences in the positions that it made itself."""
    model = tiny("llama", torch.float32).eval()
    call = compiling(model, dynamic=dynamic)
    for length in (LENGTH, 7) if dynamic else (LENGTH,):
        same_logits(model, call, input_ids=torch.arange(2 * length).view(2, length), use_cache=use_cache)
    assert {*compiling.masks()} == {CAUSAL}


def test_a_cache_that_is_filled(compiling, traced):
    """Prefill is causal; a step attends to all that is there; a few tokens behind a cache do not start at key 0."""
    model, cache = tiny("llama", torch.float32).eval(), None
    for length, means in ((LENGTH, CAUSAL), (1, NOTHING), (3, TENSOR)):
        ids = torch.arange(2 * length).view(2, length)
        with torch.no_grad():
            got = compiling(model)(input_ids=ids, past_key_values=copy.deepcopy(cache), use_cache=True)
            want = model(input_ids=ids, past_key_values=copy.deepcopy(cache), use_cache=True)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
        assert compiling.masks()[-2:] == [means, means]
        cache = want.past_key_values


def test_a_cache_with_room(compiling, traced):
    """Keys behind the last query are in the cache, and are not attended to."""
    model = tiny("llama", torch.float32).eval()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    caches = [tf.StaticCache(config=model.config, max_cache_len=LENGTH + 4) for _ in range(2)]
    with torch.no_grad():
        got, want = compiling(model)(input_ids=ids, past_key_values=caches[0]), model(ids, past_key_values=caches[1])
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    assert compiling.masks() == [CAUSAL, CAUSAL]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_data_stays(dynamic, compiling, traced):
    model, ids = tiny("llama", torch.float32).eval(), torch.arange(2 * LENGTH).view(2, LENGTH)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    packed = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).repeat(2, 1)
    call = compiling(model, dynamic=dynamic)
    for given in ({"attention_mask": padding}, {"position_ids": packed}):
        same_logits(model, call, input_ids=ids, use_cache=False, **given)
        same_logits(model, call, input_ids=ids, use_cache=False, **{k: v.flip(1) for k, v in given.items()})
    assert {*compiling.masks()} == {TENSOR}
    assert {*compiling.attentions} == {(True, False)}


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_training(numerics, compiling, traced):
    model = tiny("llama", torch.bfloat16)
    agrees(model, inputs("llama", torch.bfloat16), compiling(model, numerics=numerics))
    assert compiling.attentions == [(False, True)] * 2


def test_checkpointing(compiling, traced):
    """The mask is made outside of the graphs that are checkpointed."""
    model = tiny("llama", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    agrees(model, inputs("llama", torch.float32), compiling(model))
    assert compiling.masks() == [CAUSAL, CAUSAL] and {*compiling.attentions} == {(False, True)}


# Spellings: functions of a length, and of positions along queries and keys.


def attention(mask):
    def call(x):
        return F.scaled_dot_product_attention(x, x.cos(), x.sin(), attn_mask=mask(x), scale=0.5)

    return call


def q(x):
    return torch.arange(x.shape[-2])[:, None]


def k(x):
    return torch.arange(x.shape[-2])


def additive(mask, least=-INF):
    return torch.where(mask, 0.0, least)


CAUSAL_MASKS = {
    "le": lambda x: k(x) <= q(x),
    "lt": lambda x: k(x) < q(x) + 1,
    "not_gt": lambda x: ~(k(x) > q(x)),
    "difference": lambda x: (q(x) - k(x)).ge(0),
    "doubled": lambda x: 2 * k(x) < 2 * q(x) + 2,
    "tril": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril(),
    "transposed": lambda x: torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu().t(),
    "triu": lambda x: x.new_full((x.shape[-2], x.shape[-2]), -INF).triu(1),
    "transformer": lambda x: nn.Transformer.generate_square_subsequent_mask(x.shape[-2]),
    "least": lambda x: additive(k(x) <= q(x), torch.finfo(torch.float32).min),
    "times": lambda x: (1.0 - (k(x) <= q(x)).float()) * torch.finfo(torch.float32).min,
    "filled": lambda x: torch.zeros(x.shape[-2], x.shape[-2]).masked_fill(k(x) > q(x), -INF),
    "tensors": lambda x: torch.where(k(x) <= q(x), torch.tensor(0.0), torch.tensor(-INF)),
    "of_heads": lambda x: (k(x) <= q(x)).expand(x.shape[0], x.shape[1], -1, -1),
    "of_a_batch": lambda x: (k(x) <= q(x))[None],
    "repeated": lambda x: (k(x) <= q(x)).repeat(x.shape[0], 1, 1, 1),
    "far_window": lambda x: (k(x) <= q(x)) & (k(x) > q(x) - LENGTH),
    "a_part": lambda x: torch.ones(99, 99, dtype=torch.bool).tril()[: x.shape[-2], : x.shape[-2]],
    "gathered": lambda x: torch.ones(99, 99, dtype=torch.bool).tril()[q(x), k(x)],
    "logic": lambda x: torch.logical_not((k(x) > q(x)) | (k(x) >= x.shape[-2])),
    "two_cases": lambda x: torch.where(k(x) == q(x), True, k(x) < q(x)),
}


def written_behind_a_view(mask):
    view = mask[None]
    mask.logical_or_(mask.t().clone())
    return view


OTHER_MASKS = {
    "without_diagonal": lambda x: (k(x) < q(x)) | (k(x) == 0),
    "one_more": lambda x: k(x) <= q(x) + 1,
    "window": lambda x: (k(x) <= q(x)) & (k(x) > q(x) - LENGTH + 1),
    "both_sides": lambda x: (k(x) - q(x)).abs() < 3,
    "blocks": lambda x: k(x) // 4 <= q(x) // 4,
    "prefix": lambda x: (k(x) <= q(x)) | (k(x) < 3),
    "from_the_end": lambda x: k(x).flip(0) <= q(x).flip(0),
    "sinks": lambda x: (k(x) <= q(x)) & ((k(x) > q(x) - 4) | (k(x) == 0)),
    "of_one_head": lambda x: (k(x) <= q(x)) | (torch.arange(x.shape[1])[:, None, None] == 1),
    "of_one_row": lambda x: (k(x) <= q(x)) | (torch.arange(x.shape[0])[:, None, None, None] == 1),
    "padding": lambda x: (k(x) <= q(x)) & (x[0, 0, :, 0] > -9),
    "bias": lambda x: additive(k(x) <= q(x)) - (q(x) - k(x)),
    "small": lambda x: additive(k(x) <= q(x), -1e4),
    "scaled": lambda x: (k(x) <= q(x)).float(),
    "upper": lambda x: k(x) >= q(x),
    "bf16": lambda x: k(x).bfloat16() <= q(x).bfloat16(),
    "overflow": lambda x: (k(x) + 127).to(torch.int8) <= (q(x) + 127).to(torch.int8),
    "written": lambda x: written_behind_a_view(k(x) <= q(x)),
    "negative": lambda x: torch.ones(99, 99, dtype=torch.bool).tril()[q(x) - 1, k(x) - 1],
}


def check_spelling(mask, means, compiling, dynamic):
    x = torch.randn(2, 2, LENGTH, 8)
    call = attention(mask)
    torch.testing.assert_close(compiling(call, dynamic=dynamic)(x), call(x))
    assert compiling.masks() == [means]
    assert compiling.attentions == [MEANS[means]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CAUSAL_MASKS)
def test_causal(name, dynamic, compiling):
    sizes_matter = dynamic and name in ("far_window", "gathered")  # they are not causal for each length
    check_spelling(CAUSAL_MASKS[name], TENSOR if sizes_matter else CAUSAL, compiling, dynamic)


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_not_causal(name, compiling):
    check_spelling(OTHER_MASKS[name], TENSOR, compiling, False)


# Elements.


def ints(*size):
    return torch.arange(size[-1]).expand(size)


KNOWN = {
    "steps": lambda x: torch.arange(2, 17, 3),
    "backwards": lambda x: torch.arange(4, -1, -1),
    "part": lambda x: ints(9)[2:7],
    "each_second": lambda x: ints(12)[1::2],
    "the_last": lambda x: ints(3, 12)[-2:, -4:],
    "selected": lambda x: (ints(4) * 10 + torch.arange(4)[:, None]).select(0, -1),
    "turned": lambda x: ints(2, 3, 4).permute(2, 0, 1),
    "views": lambda x: ints(3, 4)[:, None].reshape(1, 3, 4).squeeze(0).transpose(-1, -2),
    "gathered": lambda x: ints(9)[ints(2, 3) * 2 + 1],
    "rows": lambda x: (ints(4) + 5 * torch.arange(4)[:, None])[ints(3) + 1],
    "columns": lambda x: (ints(4) + 5 * torch.arange(4)[:, None])[:, ints(3) + 1],
    "neighbours": lambda x: ints(2, 4).diff(dim=1, prepend=ints(2, 4)[:, :1] - 1),
    "counted": lambda x: torch.ones(2, 4, dtype=torch.int64).cumsum(1),
    "reverse": lambda x: 3 - ints(4),
    "of_bools": lambda x: (ints(4) > 1) * 5 - (ints(4) > 2).long(),
    "rounded": lambda x: torch.full((3,), 257.0).bfloat16(),
    "sum_that_rounds": lambda x: torch.full((3,), 256.0, dtype=torch.bfloat16) + 1.0,
    "overflow": lambda x: torch.full((3,), torch.finfo(torch.float32).min).bfloat16(),
    "filled": lambda x: torch.zeros(3, 3).masked_fill(ints(3) > 1, -INF),
    "triangles": lambda x: torch.ones(4, 4).tril(1).triu(-1),
    "part_of_data": lambda x: torch.logical_and(x[0] > 0, ints(4) < 0),
}
UNKNOWN = {
    "data": lambda x: x > 0,
    "size_of_data": lambda x: torch.zeros(4) * x,
    "another_start": lambda x: ints(2, 4).diff(dim=1, prepend=ints(2, 4)[:, :1] - 2),
    "neighbours_that_differ": lambda x: (ints(4) * ints(4)).diff(),
    "counted_from_data": lambda x: (x > 0).cumsum(1),
    "wraps": lambda x: (ints(4) + 1) + (2**63 - 1),
    "wraps_in_8_bits": lambda x: torch.full((3,), 100, dtype=torch.int8) + 100,
    "narrow": lambda x: ints(4).to(torch.int8),
    "rounds": lambda x: torch.full((3,), 0.1, dtype=torch.float16) == 0.1,
    "gradient": lambda x: torch.where(torch.ones(4) > 0, 0.0, x),
    "bits": lambda x: torch.full((3,), 1) & torch.full((3,), 2),
    "nan": lambda x: torch.full((3,), -INF) * 0,
    "index_of_floats": lambda x: ints(4).float(),
}


def element(call, x, index):
    """That of the tensor that a function computes."""
    graph = make_fx(call, tracing_mode="fake", pre_dispatch=True)(x)
    (result,) = graph.graph.find_nodes(op="output")[0].all_input_nodes
    return Elements(Region([{}], ShapeEnv())).at(result, index)


@pytest.mark.parametrize("name", KNOWN)
def test_known_elements(name):
    x = torch.randn(3, 4)
    for at, want in np.ndenumerate(KNOWN[name](x).float().numpy()):
        got = element(KNOWN[name], x, tuple(map(Integer, at)))
        assert got is not None and float(got) == want


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_elements(name):
    x = torch.randn(3, 4)
    assert element(UNKNOWN[name], x, tuple(Dummy(integer=True) for _ in UNKNOWN[name](x).shape)) is None


# Random masks. An expression is a tuple: how it is computed from a length, queries and keys is what ``tensor`` does.

NUMBERS = st.recursive(
    st.one_of(
        st.sampled_from([("q",), ("k",), ("length",)]),
        st.tuples(st.just("number"), st.integers(-3, 6)),
        st.tuples(st.just("part"), st.integers(0, 5)),
    ),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul"]), inner, inner),
        st.tuples(st.sampled_from(["turned", "first", "behind", "same", "steps", "neg"]), inner),
        st.tuples(st.sampled_from(["read", "choose"]), inner, inner, inner),
    ),
    max_leaves=5,
)
COMPARED = st.tuples(st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"]), NUMBERS, NUMBERS)
LIKELY = st.tuples(  # a comparison near the diagonal
    st.sampled_from(["le", "lt", "ge", "gt"]),
    st.tuples(st.just("add"), st.just(("k",)), st.tuples(st.just("number"), st.integers(-1, 1))),
    st.just(("q",)),
)
LOGIC = st.recursive(
    st.one_of(LIKELY, LIKELY, COMPARED),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or", "where"]), inner, inner),
        st.tuples(st.sampled_from(["not", "tril", "triu", "zeros"]), inner),
    ),
    max_leaves=4,
)


def tensor(length, expression):
    """[queries, keys] of an expression."""
    name, *rest = expression
    whole = torch.arange(length)[:, None].expand(length, length)
    values = [r if isinstance(r, int) else tensor(length, r) for r in rest]
    match name, values:
        case "q", _:
            return whole
        case "k", _:
            return whole.t()
        case "length" | "number", _:
            return whole * 0 + (values[0] if values else length)
        case "part", (start,):
            return torch.arange(length + start)[start:].expand(length, length)
        case "and", (a, b):
            return a & b
        case "or", (a, b):
            return torch.logical_or(a, b)
        case "not", (a,):
            return ~a
        case "where", (a, b):
            return torch.where(a, b, False)
        case "tril" | "triu" as part, (a,):
            return getattr(a.float(), part)(1) > 0.5
        case "zeros", (a,):
            return torch.where(a, 0.0, -INF).eq(0)
        case "turned", (a,):
            return a.transpose(0, 1).contiguous()
        case "first", (a,):
            return a[:1].expand(length, length)
        case "behind", (a,):
            return a.unsqueeze(1)[:, 0, -1:].repeat(1, length)
        case "same", (a,):
            return torch.cumsum(a.diff(dim=1, prepend=a[:, :1] - 1).ne(1), 1)
        case "steps", (a,):
            return a.diff(dim=0, append=a[-1:])
        case "neg", (a,):
            return -a
        case "read", (a, b, c):
            positions = torch.where((b >= 0) & (b < length), b, 0)
            return a[positions, torch.arange(length)] + 0 * c
        case "choose", (a, b, c):
            return torch.where(a > b, b, c)
        case _, (a, b):
            return getattr(torch, name)(a, b)


def graph_of(expression, length, symbolic):
    call = lambda x: attention(lambda x: tensor(x.shape[-2], expression))(x)  # noqa: E731
    mode = "symbolic" if symbolic else "fake"
    return make_fx(call, tracing_mode=mode, pre_dispatch=True)(torch.zeros(1, 1, length, 4))


@settings(max_examples=60, deadline=None)
@drawn(LOGIC, st.integers(2, 5))
def test_elements_are_those_of_the_tensor(expression, length):
    """At numbers for indices an element is that of the tensor, or not known."""
    graph = graph_of(expression, length, False)
    (node,) = graph.graph.find_nodes(op="call_function", target=ATTENTION)
    mask = node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"]
    want = tensor(length, expression)
    for at in itertools.product(range(length), repeat=2):
        got = Elements(Region([{}], ShapeEnv())).at(mask, tuple(map(Integer, at)))
        assert got is None or got is bool(want[at])


@settings(max_examples=60, deadline=None)
@drawn(LOGIC, st.integers(2, 6), st.booleans())
def test_only_causal_masks_are_causal(expression, length, symbolic):
    graph = graph_of(expression, length, symbolic)
    (means,) = without_masks(graph)
    for other in range(2, 8) if symbolic else (length,):
        want = tensor(other, expression)
        assert means != CAUSAL or torch.equal(want, torch.ones_like(want).tril())
        assert means != NOTHING or want.all()


# What becomes of the graph.


def test_the_other_arguments_stay(compiling):
    def call(x):
        y = x[:, :1]
        return F.scaled_dot_product_attention(x, y, y, k(x) <= q(x), 0.0, scale=0.3, enable_gqa=True)

    x = torch.randn(2, 4, LENGTH, 8)
    torch.testing.assert_close(compiling(call)(x), call(x))
    assert compiling.attentions == [(False, True)]


def test_dropout_stays():
    call = lambda x: F.scaled_dot_product_attention(x, x, x, k(x) <= q(x), 0.5)  # noqa: E731
    graph = make_fx(call, tracing_mode="fake", pre_dispatch=True)(torch.randn(1, 1, 4, 8))
    assert without_masks(graph) == [CAUSAL]
    (node,) = graph.graph.find_nodes(op="call_function", target=ATTENTION)
    assert node.args[3:] == (None, 0.5, True)


def test_only_what_nothing_reads_vanishes():
    def call(x, is_returned):
        mask = k(x) <= q(x)
        return F.scaled_dot_product_attention(x, x, x, mask), mask if is_returned else None

    for is_returned in (False, True):
        graph = make_fx(lambda x: call(x, is_returned), tracing_mode="fake", pre_dispatch=True)(torch.randn(1, 1, 4, 8))  # noqa: B023
        without_masks(graph)
        compared = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Tensor)
        assert len(compared) == is_returned


def test_the_result_lies_as_before(compiling):
    """Attention with a mask of three dims lays it out in another order than one without; views of it rely on that."""
    call = attention(lambda x: (k(x) <= q(x))[None])
    x = torch.randn(2, LENGTH, 3, 8).transpose(1, 2)
    want, got = call(x), compiling(call)(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride() != x.stride() and compiling.masks() == [CAUSAL]


def test_a_mask_with_a_gradient_stays(compiling):
    """Also where it is 0."""
    x, bias = torch.randn(1, 1, LENGTH, 8), torch.zeros(LENGTH, LENGTH, requires_grad=True)
    call = lambda x, bias: attention(lambda x: torch.where(k(x) >= 0, 0.0, bias))(x)  # noqa: E731
    compiling(call)(x, bias).sum().backward()
    assert bias.grad is not None and compiling.masks() == [TENSOR]


def test_the_report(traced):
    model = gemma3(4).eval()
    report = coda.explain(model, input_ids=torch.arange(LENGTH)[None])
    assert "attention masks: 1 causal, without a tensor; 1 read from memory" in str(report)
    assert report.document()["masks"] == {CAUSAL: 1, TENSOR: 1}
    assert "attention masks" in str(report.graphs[0])
