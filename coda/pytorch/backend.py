"""``torch.compile(model, backend="coda")``.

The graph is captured as ATen operations (``graph.py``), regions around products become programs (``regions.py``,
``translate.py``), each one call of a custom op (``op.py``), and the whole graph goes to Inductor, which does the rest.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from coda.errors import CodaError
from coda.pytorch.autocast import enters_autocast
from coda.pytorch.config import Config
from coda.pytorch.graph import CHECKPOINT, capture
from coda.pytorch.loss import fuse_losses
from coda.pytorch.masks import without_masks
from coda.pytorch.prebuild import prebuild
from coda.pytorch.refusal import Refusal
from coda.pytorch.report import Report
from coda.pytorch.rewrite import rewrite

Compiled = Callable[..., Any]


def coda(
    gm: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend: ``options`` are those of Config, ``mode`` is Inductor's."""
    config = Config.of(options)
    compiler: Callable[..., Compiled] = compile_without_autocast
    try:
        gm, report = fused(gm, config)
    except Refusal as refusal:
        report, compiler = Report.refused(gm, str(refusal)), compile_rest
    report.publish(config.verbose)
    if config.fallback == "error" and report.unfused:
        raise CodaError.of(f"not fused: {report.unfused[0]}", "fallback='inductor' leaves it to Inductor")
    return compiler(gm, inputs, mode or config.mode, config)


def fused(gm: fx.GraphModule, config: Config) -> tuple[fx.GraphModule, Report]:
    """A graph with its regions as calls of programs. Raises Refusal where it stays with Inductor as it is."""
    refuse(gm)
    if is_on_ranks(gm):
        from coda.pytorch.dtensor import on_local_parts

        return on_local_parts(gm, lambda captured: rewritten(captured, config))
    captured = capture(gm)
    return captured, rewritten(captured, config)


def rewritten(gm: fx.GraphModule, config: Config) -> Report:
    """What becomes of a captured graph, which is rewritten in place."""
    masks = without_masks(gm)
    losses = fuse_losses(gm, "low" if config.fuse_loss == "low" else "fast") if config.fuse_loss else []
    done = rewrite(gm, config, torch.is_grad_enabled())
    prebuild(gm)
    return Report.of(gm, done, losses, masks)


def refuse(gm: fx.GraphModule) -> None:
    """Raise Refusal where a graph stays with Inductor as it is."""
    examples = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    tensors = [x for x in examples if isinstance(x, Tensor)]
    if not tensors:
        raise Refusal("it has no tensors")
    for x in tensors:
        if is_traceable_wrapper_subclass(x) and not is_distributed(x):
            raise Refusal(
                f"it works on {type(x).__name__}s, whose local parts this backend does not see: compile what runs on "
                "the local parts"
            )
    inner = [n for n in gm.graph.nodes if isinstance(n.target, HigherOrderOperator) and n.target is not CHECKPOINT]
    if inner and enters_autocast(gm):
        raise Refusal(f"it runs '{inner[0].target.name()}' under autocast, which does not reach into it here")


def is_on_ranks(gm: fx.GraphModule) -> bool:
    """Whether a graph has tensors that are parts on several ranks, or that are still communicated."""
    return any(is_distributed(x) for n in gm.graph.nodes for x in tree_leaves(n.meta.get("example_value")))


def is_distributed(x: Any) -> bool:
    return is_traceable_wrapper_subclass(x) and type(x).__name__ in ("DTensor", "AsyncCollectiveTensor")


def compile_rest(gm: fx.GraphModule, inputs: Sequence[Any], mode: str | None, config: Config) -> Compiled:
    """The graph by Inductor, or by AOT autograd alone."""
    if config.inductor and can_run_inductor(inputs):
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(gm, list(inputs), config_patches=list_mode_options(mode) if mode else None)
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, inputs)


def compile_without_autocast(gm: fx.GraphModule, *how: Any) -> Compiled:
    """The same, of a captured graph: where autocast is on its casts are in the graph by now."""
    if not torch._C._is_any_autocast_enabled():
        return compile_rest(gm, *how)
    with torch._C._DisableAutocast():
        compiled = compile_rest(gm, *how)

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return compiled(*args)

    return run


def can_run_inductor(inputs: Sequence[Any]) -> bool:
    """Inductor needs a C++ compiler for what runs on a CPU."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in inputs)
    return on_gpu or any(shutil.which(c) for c in ("g++", "clang++", "c++"))
