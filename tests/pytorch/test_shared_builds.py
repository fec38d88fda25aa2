"""The ranks of a job share the cache: what all of them run is compiled by one, and the others wait for it."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from coda import build
from coda.build.toolchain import Toolchain
from coda.pytorch import prebuild
from coda.runtime import library
from tests.pytorch.handwritten import SMALL, WIDE, Titan

RANKS = 2
TOOLS = Toolchain(*(Path("nvcc"), "13.0", Path("c++"), "12", Path("include"), Path("lib"), Path("cutlass"), "4.2.0"))


def without_compilers(folder: Path, rank: int) -> None:
    """Compilers that note what they are given, take a while, and make empty files."""

    def compiling(target: Path, unit: str, *_) -> None:
        with (folder / f"compiled{rank}.txt").open("a") as file:
            print(unit, (target / unit).read_text().__hash__(), file=file)
        time.sleep(0.2)
        for name in (build.CUBIN, "build.log", unit):
            (target / name).touch()

    build.toolchain.find = lambda: TOOLS
    build.compile_unit, build.compile_host = compiling, lambda folder, tools: None
    build.link = lambda target, name, *_: (target / f"{name}.so").touch()
    library.Artifact = lambda path, program=None: path
    prebuild._is_on_gpu = lambda call: True


def rank_main(rank: int, folder: str) -> None:
    os.environ["CODA_CACHE"] = f"{folder}/cache"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    without_compilers(Path(folder), rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Titan(1, WIDE).bfloat16())
    model.compile(backend="coda", options={"inductor": False})
    ids = torch.randint(0, SMALL.vocabulary, (2, 12), generator=torch.Generator().manual_seed(rank))
    dist.barrier()
    model(input_ids=ids, labels=ids).loss.backward()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks_compile_each_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # the same hashes of texts in both
    torch.multiprocessing.spawn(rank_main, (str(tmp_path),), nprocs=RANKS)
    compiled = Counter(line for log in tmp_path.glob("compiled*.txt") for line in log.read_text().splitlines())
    assert len(compiled) > 4 and set(compiled.values()) == {1}
    libraries = [*(tmp_path / "cache").glob("??/*/*.so")]
    assert len(libraries) == len({p.parent for p in libraries}) >= 4  # forward and backward of two regions
