"""``torch.ops.coda.block``: one functional custom op for every program.

    block(Tensor[] tensors, SymInt[] sizes, str program, str options) -> Tensor[]

``tensors`` are the parameters of the program in order, ``sizes`` its symbolic sizes (see ``Options``); the result are
the outputs of the forward, then what its backward needs. The fake kernel follows from the program's types, autograd
from the derived program, which runs through the same op. Operands may have any strides and are never written; results
are new and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import torch_dtype
from coda.errors import CodaError
from coda.pytorch.block import Block, block
from coda.pytorch.bound import Calls, call_key
from coda.pytorch.execute import execute
from coda.runtime.binding import type_shape

NAME = "coda::block"
torch.library.define(
    NAME, "(Tensor[] tensors, SymInt[] sizes, str program, str options) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)  # fmt: skip


def run_block(tensors: Sequence[Tensor], sizes: Sequence[int], program: str, options: str) -> list[Tensor]:
    """Run a block on tensors. ``torch.library.custom_op`` would do the same, in more time for each call."""
    calls = bound_calls(program, options)
    key = call_key(tensors, sizes)
    if (found := calls.run(key, tensors)) is not None:
        return found
    it = calls.block
    known = it.named_sizes(sizes)
    inputs = {p.name: x.reshape(type_shape(p.type, known)) for p, x in zip(it.forward.params, tensors, strict=True)}
    results = execute(it.forward, inputs, known, it.options.fallback, it.options.chunk, it.options.tune)
    if is_bound(tensors):
        calls.remember(key, tensors, known)
    return [results[o.name].view(it.shape(o, known)) for o in it.forward.outputs]


def is_bound(tensors: Sequence[Tensor]) -> bool:
    """Whether calls on these tensors are remembered: the interpreter has nothing to remember."""
    return any(x.is_cuda for x in tensors)


@cache
def bound_calls(program: str, options: str) -> Calls:
    return Calls(block(program, options))


torch.library.impl(NAME, ("cpu", "cuda"), run_block)


@torch.library.register_fake(NAME)
def _fake(tensors: Sequence[Tensor], sizes: Sequence[int], program: str, options: str) -> list[Tensor]:
    it = block(program, options)
    known, like = it.named_sizes(sizes), _largest(tensors)
    return [like.new_empty(it.shape(o, known), dtype=torch_dtype(o.type.dtype)) for o in it.forward.outputs]


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """A tensor on the device of the call: scalars may be on the CPU."""
    return max(tensors, key=lambda x: x.dim())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save what the backward reads."""
    tensors, sizes, program, options = inputs
    it = block(program, options)
    ctx.block, ctx.sizes, ctx.shapes = it, sizes, [x.shape for x in tensors]
    ctx.set_materialize_grads(False)
    if it.gradients is None:
        return
    there = dict(zip((p.name for p in it.forward.params), tensors, strict=True))
    there |= dict(zip((o.name for o in it.forward.outputs), output, strict=True))
    ctx.names = [p.name for p in it.gradients.backward.params if p.name in there]
    ctx.save_for_backward(*(there[n] for n in ctx.names))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    it: Block = ctx.block
    if it.gradients is None:
        raise CodaError.of(f"program '{it.program.name}' was run without its derivative", "second derivatives and "
                           "gradients that were not asked for when it was compiled are not available")  # fmt: skip
    names = [p.name for p in it.program.params]
    known = it.gradients.gradients
    wanted = tuple(n for n, needed in zip(names, ctx.needs_input_grad[0], strict=True) if needed and n in known)
    if not wanted or all(g is None for g in grads):
        return [None] * len(names), None, None, None
    program, text, options = it.backward(wanted)
    there = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | _seeds(ctx, grads)
    results = BLOCK([there[p.name] for p in program.params], ctx.sizes, text, options)
    by_output = dict(zip((o.name for o in program.outputs), results, strict=True))
    found = {n: by_output[known[n]] for n in wanted}
    gradients = [found[n].reshape(s) if n in found else None for n, s in zip(names, ctx.shapes, strict=True)]
    return gradients, None, None, None


def _seeds(ctx: Any, grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The gradient of each output, 0 where nothing reads it."""
    it, like = ctx.block, next(g for g in grads if g is not None)
    known = it.named_sizes(ctx.sizes)
    return {
        f"d_{o.name}": g if g is not None else like.new_zeros(it.shape(o, known), dtype=torch_dtype(o.type.dtype))
        for o, g in zip(it.program.outputs, grads, strict=False)
    }


torch.library.register_autograd(NAME, _backward, setup_context=_keep)
BLOCK = torch.ops.coda.block.default
