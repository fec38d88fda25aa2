"""The kernels of a graph are built when it is compiled, all at once, so that its first call does not build them one
after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from coda.build.compile import CORES
from coda.errors import CodaError
from coda.ir import Program
from coda.pytorch.block import Options, block
from coda.pytorch.execute import Step, steps
from coda.pytorch.rewrite import Fused
from coda.pytorch.translate import Translation


def prebuild(fused: Sequence[Fused]) -> None:
    """Build what the regions run on a GPU, forward and backward. What fails is told where it is called."""
    jobs = {id(step): (step, sizes) for f in fused if _is_on_gpu(f) for step, sizes in _steps(f)}
    if not jobs:
        return
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(_build, *zip(*jobs.values(), strict=True)))


def _steps(fused: Fused) -> Iterator[tuple[Step, dict[str, int]]]:
    sizes = size_hints(fused.translation)
    for program, options in _programs(fused):
        for step in steps(program, options.fallback, options.chunk, options.tune):
            yield step, sizes


def _programs(fused: Fused) -> Iterator[tuple[Program, Options]]:
    it = block(fused.text, fused.options.text())
    yield it.forward, it.options
    if it.gradients is not None:
        program, _, options = it.backward(tuple(it.gradients.gradients))
        yield program, Options.of(options)


def _is_on_gpu(fused: Fused) -> bool:
    return bool(fused.region.nodes[0].meta["val"].device.type == "cuda")


def size_hints(made: Translation) -> dict[str, int]:
    """The symbolic sizes of a program as those of the inputs that the graph was compiled with."""
    known = {}
    for node in made.tensors:
        value = node.meta["val"]
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.has_hint():
                known[size.node.expr] = int(size.node.hint)
    return {n: int(s) if s.is_Integer else known[s] for n, s in made.sizes.items() if s.is_Integer or s in known}


def _build(step: Step, sizes: dict[str, int]) -> None:
    if step.compiled is not None:
        with suppress(CodaError):  # remembered, and told by the call
            step.compiled.built({n: s for n, s in sizes.items() if n in step.symbols})
