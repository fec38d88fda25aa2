"""Data parallel, fully sharded and tensor parallel training on two ranks: the losses and gradients of one rank.

On gloo and the CPU in any case, on NCCL where there are two GPUs. Each test spawns its ranks: they share the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coda.pytorch.report import listening
from tests.pytorch.handwritten import SMALL, Titan
from tests.pytorch.models import WIDE

RANKS, STEPS, BATCH, LENGTH = 2, 2, 4, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Wrap = Callable[[nn.Module, str], nn.Module]


def compiled(module: nn.Module) -> None:
    module.compile(backend="coda", options={"inductor": False})


def model_of(device: str, dtype: torch.dtype) -> nn.Module:
    """On a GPU of sizes that kernels take."""
    torch.manual_seed(0)
    return Titan(sizes=WIDE if device == "cuda" else SMALL).to(device, dtype)


def ids_of(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SMALL.vocabulary, (STEPS, BATCH, LENGTH), generator=generator).to(device)


def train(model: nn.Module, ids: Tensor) -> list[float]:
    """The losses of a few steps of gradient descent."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in ids:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


# How a model is made parallel. Each compiles what its users compile.


def data_parallel(model: nn.Module, device: str) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
    compiled(wrapped)
    return wrapped


def fully_sharded(model: nn.Module, device: str) -> nn.Module:
    """Block by block, as FSDP users compile: parameters are gathered outside of the compiled part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (RANKS,))
    for layer in model.layers:
        compiled(layer)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module, device: str) -> nn.Module:
    """Heads and inner columns over the ranks: q, k, v, gate and up by columns, o and down by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device, (RANKS,))
    columns, rows = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")
    for layer in model.layers:
        plan: dict[str, Any] = {n: ColwiseParallel() for n in columns} | {n: RowwiseParallel() for n in rows}
        parallelize_module(layer, mesh, plan)
    compiled(model)
    return model


def rank_main(rank: int, folder: str, device: str, wrap: Wrap, shards_data: bool) -> None:
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        torch.set_num_threads(1)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model, ids = wrap(model_of(device, dtype), device), ids_of(device)
        with listening() as reports:
            losses = torch.tensor(train(model, ids.chunk(RANKS, 1)[rank] if shards_data else ids))
        assert shards_data == any(r.fused for r in reports)
        if shards_data:
            losses = losses.to(device)
            dist.all_reduce(losses)
            losses /= RANKS
        torch.save(losses.cpu(), Path(folder) / f"losses{rank}.pt")
    finally:
        dist.destroy_process_group()


def losses_of(wrap: Wrap, device: str, shards_data: bool) -> list[Tensor]:
    """The losses that each rank sees."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, device, wrap, shards_data), nprocs=RANKS)
        return [torch.load(Path(folder) / f"losses{rank}.pt") for rank in range(RANKS)]


@pytest.mark.skipif(not dist.is_available() or os.name != "posix", reason="needs torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("wrap", "shards_data"),
    [
        (data_parallel, True),
        pytest.param(fully_sharded, True, marks=pytest.mark.slow),
        pytest.param(tensor_parallel, False, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_rank(wrap, shards_data, device):
    """Of one process in float32, uncompiled; in bf16, as on a GPU, up to the rounding of a loss."""
    found = losses_of(wrap, device, shards_data)
    alone = torch.tensor(train(model_of(device, torch.float32), ids_of(device)))
    tolerance = 1e-4 if device == "cpu" else 2**-7
    for losses in found:
        torch.testing.assert_close(losses, alone, rtol=tolerance, atol=1e-5)
