"""Data parallel, fully sharded and tensor parallel training on two ranks: the losses and gradients of one rank.

On gloo and the CPU in any case, on NCCL where there are two GPUs. Each test spawns its ranks: they share the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from coda.pytorch.report import listening
from tests.pytorch.handwritten import SMALL, WIDE, Titan
from tests.pytorch.parallel import Decoder, with_sequence, without_sequence

RANKS, STEPS, BATCH, LENGTH = 2, 2, 4, 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Builder = Callable[..., nn.Module]
Wrap = Callable[[nn.Module, str], nn.Module]


def compiled(module: nn.Module) -> None:
    module.compile(backend="coda", options={"inductor": False})


def model_of(builder: Builder, device: str, dtype: torch.dtype) -> nn.Module:
    """On a GPU of sizes that kernels take."""
    torch.manual_seed(0)
    return builder(sizes=WIDE if device == "cuda" else SMALL).to(device, dtype)


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
    from torch.distributed.device_mesh import init_device_mesh

    without_sequence(model, init_device_mesh(device, (RANKS,)))
    compiled(model)
    return model


def sequence_parallel(model: nn.Module, device: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    with_sequence(model, init_device_mesh(device, (RANKS,)))
    compiled(model)
    return model


def sharded_and_tensor_parallel(model: nn.Module, device: str) -> nn.Module:
    """On a mesh of two dims, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (1, RANKS), mesh_dim_names=("data", "tensor"))
    without_sequence(model, mesh["tensor"])
    for layer in model.layers:
        compiled(layer)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the last step, whole."""
    found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).cpu() for n, g in found.items()}


def rank_main(rank: int, folder: str, device: str, wrap: Wrap, builder: Builder, shards_data: bool) -> None:
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        torch.set_num_threads(1)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model, ids = wrap(model_of(builder, device, dtype), device), ids_of(device)
        with listening() as reports:
            losses = torch.tensor(train(model, ids.chunk(RANKS, 1)[rank] if shards_data else ids))
        assert any(r.fused for r in reports)
        if shards_data:
            losses = losses.to(device)
            dist.all_reduce(losses)
            losses /= RANKS
        torch.save((losses.cpu(), gradients(model)), Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()


def found_by(wrap: Wrap, builder: Builder, device: str, shards_data: bool) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The losses and the last gradients that each rank sees."""
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder, device, wrap, builder, shards_data), nprocs=RANKS)
        return [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.skipif(not dist.is_available() or os.name != "posix", reason="needs torch.distributed")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("wrap", "builder", "shards_data"),
    [
        (data_parallel, Titan, True),
        pytest.param(fully_sharded, Titan, True, marks=pytest.mark.slow),
        pytest.param(tensor_parallel, Decoder, False, marks=pytest.mark.slow),
        (sequence_parallel, Decoder, False),
        pytest.param(sharded_and_tensor_parallel, Decoder, False, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_rank(wrap, builder, shards_data, device):
    """Of one process in float32, uncompiled; in bf16, as on a GPU, up to the rounding of a loss. On a CPU the
    gradients, too."""
    found = found_by(wrap, builder, device, shards_data)
    model = model_of(builder, device, torch.float32)
    alone = torch.tensor(train(model, ids_of(device)))
    tolerance = 1e-4 if device == "cpu" else 2**-7
    for losses, grads in found:
        torch.testing.assert_close(losses, alone, rtol=tolerance, atol=1e-5)
        for name, grad in gradients(model).items() if device == "cpu" else ():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))
