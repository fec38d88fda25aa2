"""Tensor parallelism in one process, whose collectives do nothing: what is fused, and what is communicated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("torch.distributed.tensor")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from coda.pytorch import backend
from coda.pytorch.dtensor.layout import of_gradient, summed_dims
from tests.pytorch.parallel import Decoder, with_sequence, without_sequence

R, P, S = Replicate(), Partial(), Shard


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def compiled(function: Callable, **how) -> Callable:
    return torch.compile(function, backend="coda", options={"inductor": False, **how})


def step(model: nn.Module) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(ids, ids).loss.backward()


INNER = ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("plan", "fused"),
    [(without_sequence, ["head", *INNER, "wk", "wq", "wv"]), (with_sequence, [*INNER, "wk", "wq", "wv"])],
)
def test_regions_are_those_between_the_collectives(mesh, reports, plan, fused):
    """A norm of whole rows is in the region of its products; behind it the rows are gathered where each rank norms a
    part of them."""
    model = Decoder()
    plan(model, mesh)
    step(compiled(model))
    (report,) = reports
    assert sorted(x.name.split(".")[-1] for x in report.fused) == fused
    assert {x.name.split(".")[-1] for x in report.unfused} == {"head", "wo"} - set(fused)
    assert all("nothing to fuse" in str(x.reason) for x in report.unfused)
    gate = next(x for x in report.fused if x.name.endswith("w1"))
    assert ("rms_norm" in gate.fused_with) == (plan is without_sequence)


@pytest.mark.parametrize(
    ("plan", "eager", "expected"),
    [
        (without_sequence, {"all_reduce": 7}, {"all_reduce": 6}),
        (with_sequence, *2 * [{"all_gather_into_tensor": 7, "reduce_scatter_tensor": 6}]),
    ],
)
def test_what_is_communicated(mesh, monkeypatch, plan, eager, expected):
    """As much as PyTorch does in eager mode. Without sequence parallelism the gradients of q, k and v are added before
    the ranks add theirs, and so are those of gate and up; the gradients of the weights of norms come as small sums."""
    alone, model = Decoder(), Decoder()
    plan(alone, mesh)
    plan(model, mesh)
    with CommDebugMode() as seen:
        step(alone)
    assert {str(op).split(".")[-1]: n for op, n in seen.get_comm_counts().items()} == eager

    ours = Counter[str]()

    def counting(gm: fx.GraphModule, inputs: Any) -> Callable:
        ours.update(str(n.target.overloadpacket).split(".")[-1] for n in gm.graph.nodes if "_c10d" in str(n.target))
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(backend, "compile_rest", lambda gm, x, *_: aot_autograd(fw_compiler=counting)(gm, x))
    step(compiled(model))
    del ours["wait_tensor"]
    assert ours == expected


def test_a_llama_of_transformers(mesh, reports):
    llama = pytest.importorskip("tests.pytorch.models").tiny("llama", torch.float32)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in llama.model.layers:
        plan: dict[str, Any] = {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}
        parallelize_module(layer, mesh, plan)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    compiled(llama)(input_ids=ids, labels=ids).loss.backward()
    assert {x.name.split(".")[-1] for x in reports[-1].unfused} == {"o_proj"}
    assert len(reports[-1].fused) == 2 * 6 + 1


def test_under_autocast(mesh, reports):
    model = Decoder()
    with_sequence(model, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        step(compiled(model))
    assert len(reports[-1].fused) == 6 and "bf16" in reports[-1].texts[0]


def test_lengths_that_vary(mesh, reports):
    """One more graph for all of them, and its regions are the same."""
    model = Decoder()
    with_sequence(model, mesh)
    run = compiled(model)
    for length in (8, 12, 16):
        ids = torch.zeros(2, length, dtype=torch.int64)
        run(ids, ids).loss.backward()
    assert [len(r.fused) for r in reports] == [6, 6]


def test_no_gradients_no_sums_of_them(mesh, reports):
    model = Decoder()
    without_sequence(model, mesh)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        compiled(model)(ids, ids)
    assert len(reports[-1].fused) == 7 and not any(p.grad is not None for p in model.parameters())


@pytest.mark.skipif(
    not torch.__version__.startswith("2.11"), reason="AOT autograd of torch 2.13 fails with any backend"
)
def test_under_activation_checkpointing(mesh, reports):
    model = Decoder()
    with_sequence(model, mesh)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    step(compiled(model))
    assert len(reports[-1].fused) == 6


def test_what_is_still_communicated_is_read(mesh, reports):
    """The rows that a part of a vocabulary gives come while the first block begins, where blocks are compiled. Of torch
    2.13 AOT autograd gives no gradient for them, whatever the backend."""
    model = Decoder()
    with_sequence(model, mesh)
    model.layers[0].compile(backend="coda", options={"inductor": False})
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(ids, ids)
    assert len(reports[-1].fused) == 6


def test_gradients_lie_like_their_parameters(mesh):
    """But where PyTorch itself leaves the sum to the optimizer: a weight that all ranks have, read with their part of
    the rows."""
    model = Decoder()
    with_sequence(model, mesh)
    step(compiled(model))
    for name, p in model.named_parameters():
        assert p.grad.placements == ((P,) if "norm" in name else p.placements), name


def weight(mesh: DeviceMesh, *shape: int, placement=R) -> DTensor:
    """A parameter, of which this rank has the first part."""
    whole = torch.randn(*shape)
    part = whole.chunk(mesh.size(), placement.dim)[0].clone() if placement.is_shard() else whole
    placements = [placement] * mesh.ndim
    made = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return made.requires_grad_()


def test_a_product_that_communicates_is_left_with_the_reason(mesh, reports):
    w, v = weight(mesh, 32, 16, placement=S(1)), weight(mesh, 24, 32, placement=S(0))

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        parts = torch.nn.functional.linear(DTensor.from_local(x, mesh, [S(1)], run_check=False), w)
        return torch.nn.functional.linear(parts, v).to_local()

    compiled(f)(torch.randn(4, 8), w, v)
    assert "it communicates" in str(reports[-1].unfused[-1].reason)


def test_shards_that_differ_in_size_are_left_with_the_reason(mesh, reports):
    """Ranks that fuse different products could wait for each other."""
    w = weight(mesh, 33, 16, placement=S(0))

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(DTensor.from_local(x, mesh, [R], run_check=False), w).sigmoid().to_local()

    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(f)(x, w), f(x, w))
    assert "its shards differ in size" in str(reports[-1].unfused[-1].reason)


def test_a_graph_that_writes_into_a_dtensor_stays_as_it_is(mesh, reports):
    w = weight(mesh, 32, 16, placement=S(0))

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.nn.functional.linear(DTensor.from_local(x, mesh, [R], run_check=False), w)
        return y.relu_().to_local()

    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(f)(x, w), f(x, w))
    assert "writes into a DTensor" in str(reports[-1].unfused[0].reason)


def test_a_dtensor_that_is_returned_is_one(mesh, reports):
    w = weight(mesh, 32, 16, placement=S(0))

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w).sigmoid()

    x = weight(mesh, 4, 16)
    y = compiled(f)(x, w)
    y.sum().backward()
    assert reports[-1].fused and y.placements == (S(1),) and y.shape == (4, 32)
    torch.testing.assert_close(y.to_local(), f(x, w).to_local())
    assert x.grad.placements == (P,) and w.grad.placements == (S(0),)


def test_a_dim_of_one_mesh_is_not_that_of_another():
    """A weight on both dims of a mesh, which a product on the second reads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        x, w = weight(mesh, 4, 16, placement=R), weight(mesh["tensor"], 32, 16, placement=S(0))

        def f(x: Tensor, w: Tensor) -> Tensor:
            rows = DTensor.from_local(x.to_local(), w.device_mesh, [R], run_check=False)
            return torch.nn.functional.linear(rows, w).sigmoid().to_local()

        compiled(f)(x, w).sum().backward()
        assert x.grad.placements == (R, R) and w.grad.placements == (S(0),)
    finally:
        dist.destroy_process_group()


def test_a_weight_that_all_ranks_have_is_a_weight(mesh, reports):
    """Its rows are no rows of the program, though its gradient is a sum over the ranks."""
    w = weight(mesh, 32, 16)

    def f(x: Tensor, w: Tensor) -> Tensor:
        rows = DTensor.from_local(x, mesh, [S(0)], run_check=False)
        return torch.nn.functional.linear(rows, w).sigmoid().to_local()

    compiled(f)(torch.randn(4, 16), w).sum().backward()
    assert "w: f32[N=32, N2=16]" in reports[-1].texts[0] and w.grad.placements == (P,)


@pytest.mark.parametrize(
    ("operands", "results", "summed"),
    [
        ([[R], [R]], [[R]], [[], []]),
        ([[R], [S(0)]], [[S(1)]], [[0], []]),  # a column's product
        ([[S(1)], [S(1)]], [[P]], [[], []]),  # a row's
        ([[S(0)], [R]], [[S(0)]], [[], [0]]),  # a norm of a part of the rows
        ([[P], [R]], [[P]], [[], [0]]),
        ([[P], [S(0)]], [[P]], None),
        ([[P]], [[R]], None),
        ([[S(0)]], [[R]], None),
        ([[S(0), R], [R, S(0)]], [[S(0), S(1)]], [[1], [0]]),  # rows over one dim of the mesh, columns over the other
    ],
)
def test_where_gradients_are_parts_of_a_sum(operands, results, summed):
    assert summed_dims(operands, results) == (None if summed is None else [frozenset(x) for x in summed])


def test_layout_of_gradients():
    assert of_gradient((R, S(1), P)) == (R, S(1), R)
    assert of_gradient((R, S(1)), frozenset([0])) == (P, S(1))
