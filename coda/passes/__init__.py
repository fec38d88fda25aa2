"""IR to IR, one pass a file. The order is here:

    checked program
      -> simplify       bitwise rewrites (simplify.py)
      -> delay_norm     factors of whole rows move behind products (delay_norm.py, terms.py)
      -> sink           and behind what is linear in a product (sink.py)
      -> scale_in       factors of products in a sum go before them (scale_in.py)
      -> fold           vectors over contracted axes go into frozen weights (fold.py)
      -> differentiate  where gradients are wanted (differentiate.py); save.py decides what the forward keeps
      -> delay_norm     of the backward: dy.T @ (h * g) becomes (dy.T @ h) * g
      -> join_sums      sums of reductions become reductions of sums (join_sums.py)
      -> hoist          and their divisors go behind them (hoist.py)
      -> simplify
      -> narrow         of the backward: gradients between kernels are rounded, once (narrow.py)
      -> partition      kernels (kernels.py, partition.py): merge.py says which products one of them computes,
                        schedule.py when, edges.py what lies between them

A pass is a pure function from a program to a program, or to a program and notes: what it did, with a label, or why it
did nothing (labels.py). ``prove.py`` shows that a rewrite is an identity over the reals. eager.py rounds as eager
PyTorch does, lanes.py unrolls lane axes for the lowering. Functions were expanded by the checker; which way round a
product is computed is not decided here, as operands and results go by the names of their axes. bare.py gives up the
epilogue of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coda.ir import Program
from coda.passes.delay_norm import delay_norm
from coda.passes.differentiate import Backward, differentiate
from coda.passes.fold import fold
from coda.passes.hoist import hoist
from coda.passes.join_sums import join_sums
from coda.passes.kernels import Partition
from coda.passes.labels import Note
from coda.passes.merge import MOST
from coda.passes.narrow import narrow
from coda.passes.partition import partition
from coda.passes.scale_in import scale_in
from coda.passes.simplify import simplify
from coda.passes.sink import sink

__all__ = ["Block", "Note", "Partition", "derive", "fuse", "optimize", "partition"]

Rewrite = Callable[[Program], "Program | tuple[Program, tuple[Note, ...]]"]


@dataclass(frozen=True)
class Block:
    """A block program as kernels, forward and, where gradients are wanted, backward."""

    program: Program  # as it was checked
    forward: Partition
    backward: Partition | None
    gradients: Backward | None
    notes: tuple[Note, ...]


def rewrites(numerics: str, trained: bool = False) -> tuple[Rewrite, ...]:
    """What a forward or backward program goes through, in order. Where rounding is eager, only what keeps every bit.
    ``trained``: it is a forward whose gradients will be derived."""
    if numerics == "eager":
        return (simplify, lambda p: delay_norm(p, numerics))  # which says what it does not do
    return (simplify, partial(delay_norm, trained=trained), sink, scale_in, fold, join_sums, hoist, simplify)


def optimize(program: Program, numerics: str = "fused", trained: bool = False) -> tuple[Program, tuple[Note, ...]]:
    """A program after all rewrites, and what they did."""
    notes: list[Note] = []
    for apply in rewrites(numerics, trained):
        result = apply(program)
        program, more = result if isinstance(result, tuple) else (result, ())
        notes += more
    return program, tuple(notes)


def derive(
    program: Program,
    wrt: Sequence[str] | None = None,
    *,
    numerics: str = "fused",
    memory: str = "fast",
    accumulate: Collection[str] = (),
) -> tuple[Backward, tuple[Note, ...]]:
    """The rewritten forward and its derived, rewritten backward."""
    forward, notes = optimize(program, numerics, trained=True)
    backward = differentiate(forward, wrt, memory=memory, numerics=numerics, accumulate=accumulate)
    optimized, more = optimize(backward.backward, numerics)
    if numerics == "fused":
        known = {p.name for p in forward.params} | {o.name for o in backward.forward.outputs}
        upstream = {p.name for p in optimized.params} - known
        optimized, rounded = narrow(optimized, upstream)
        more += rounded
    return replace(backward, backward=optimized), (*notes, *backward.notes, *more)


def fuse(
    program: Program,
    wrt: Sequence[str] | None = (),
    *,
    numerics: str = "fused",
    most: Mapping[str, int] = MOST,
    **options: Any,
) -> Block:
    """The kernels of a block program. ``wrt`` names the parameters that want gradients, None all that can have one;
    with no name there is no backward. ``most``: see ``merge.py``."""
    if wrt is not None and not wrt:
        forward, notes = optimize(program, numerics)
        return Block(program, partition(forward, most), None, None, notes)
    gradients, notes = derive(program, wrt, numerics=numerics, **options)
    return Block(program, partition(gradients.forward, most), partition(gradients.backward, most), gradients, notes)
