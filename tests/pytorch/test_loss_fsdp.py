"""The fused loss under FSDP2 and DDP: two processes get the loss and gradients of one.

On gloo and the CPU in any case, on NCCL where there are two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from coda.nn import LinearCrossEntropy

RANKS, ROWS, WIDTH, CLASSES = 2, 24, 64, 200
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {"cpu": 1e-5, "cuda": 2**-6}  # of gradients in f32, and in bf16

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


class Model(nn.Module):
    def __init__(self, memory: str):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.loss = LinearCrossEntropy(WIDTH, CLASSES, memory=memory)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.body(x)), target)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RANKS * ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (RANKS * ROWS,), generator=generator)


def model(memory: str) -> Model:
    torch.manual_seed(0)
    return Model(memory)


def step(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The loss and the gradients, by name."""
    loss = module(x, target)
    loss.backward()
    whole = {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in module.named_parameters()
    }
    return {"loss": loss.detach(), **{n.removeprefix("module."): g for n, g in whole.items()}}


def worker(rank: int, folder: str, device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, target = (t.chunk(RANKS)[rank].to(device) for t in batch())
    x = x.to(dtype)
    found = {}
    for memory in ("fast", "low"):
        sharded = model(memory).to(device, dtype)
        fully_shard(sharded.loss)
        fully_shard(sharded)
        assert type(sharded.loss.weight).__name__ == "DTensor"
        found["fsdp", memory] = step(sharded, x, target)
        found["ddp", memory] = step(nn.parallel.DistributedDataParallel(model(memory).to(device, dtype)), x, target)
    for results in found.values():
        dist.all_reduce(results["loss"], dist.ReduceOp.SUM)
        results["loss"] /= RANKS
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()  # a rank that leaves while the other still works was seen to abort
    dist.destroy_process_group()


@pytest.mark.parametrize("device", DEVICES)
def test_o1_two_ranks_are_one(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    torch.multiprocessing.spawn(worker, (str(tmp_path), device), nprocs=RANKS)
    found = torch.load(tmp_path / "found.pt", map_location="cpu")
    x, target = batch()
    for (_, memory), results in found.items():
        want = step(model(memory), x, target)
        assert results.keys() == want.keys()
        for name, value in want.items():
            error = (results[name].double() - value.double()).norm()
            assert error <= TOLERANCE[device] * value.double().norm(), (name, memory)
