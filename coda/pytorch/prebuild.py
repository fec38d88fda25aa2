"""The kernels of a graph are built when it is compiled, all at once, so that its first call does not build them one
after the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import fx

from coda.build.compile import CORES
from coda.errors import CodaError
from coda.ir import Program
from coda.pytorch.block import Options, block
from coda.pytorch.execute import Step, steps
from coda.pytorch.graph import bodies
from coda.pytorch.op import BLOCK


def prebuild(gm: fx.GraphModule) -> None:
    """Build what the calls of the op in a graph run on a GPU, forward and backward: regions, fused losses, functions
    that the model itself calls. What fails is told where it is called."""
    jobs = {id(step): (step, sizes) for call in _calls(gm) if _is_on_gpu(call) for step, sizes in _steps(call)}
    if not jobs:
        return
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(_build, *zip(*jobs.values(), strict=True)))


def _calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    yield from gm.graph.find_nodes(op="call_function", target=BLOCK)
    for body, _ in bodies(gm):
        yield from _calls(body)


def _steps(call: fx.Node) -> Iterator[tuple[Step, dict[str, int]]]:
    _, sizes, text, how = call.args
    hints = size_hints(Options.of(how).sizes, sizes)
    for program, options in _programs(text, how):
        for step in steps(program, options.fallback, options.chunk, options.tune):
            yield step, hints


def _programs(text: str, how: str) -> Iterator[tuple[Program, Options]]:
    it = block(text, how)
    yield it.forward, it.options
    if it.gradients is not None:
        program, _, options = it.backward(tuple(it.gradients.gradients))
        yield program, Options.of(options)


def _is_on_gpu(call: fx.Node) -> bool:
    return any("val" in x.meta and x.meta["val"].device.type == "cuda" for x in call.args[0])


def size_hints(names: tuple[str, ...], sizes: list[int | fx.Node]) -> dict[str, int]:
    """The sizes that a call is given as those of the inputs that the graph was compiled with."""
    known = {}
    for name, size in zip(names, sizes, strict=True):
        value = size.meta.get("val") if isinstance(size, fx.Node) else size
        if isinstance(value, int) or (isinstance(value, torch.SymInt) and value.node.has_hint()):
            known[name] = value if isinstance(value, int) else int(value.node.hint)
    return known


def _build(step: Step, sizes: dict[str, int]) -> None:
    if step.compiled is not None:
        with suppress(CodaError):  # remembered, and told by the call
            step.compiled.built({n: s for n, s in sizes.items() if n in step.symbols})
