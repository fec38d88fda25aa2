"""The calls by which tensors become DTensors, go back, or are laid anew."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

NAMES = ("from_local", "to_local", "redistribute")


def conversion(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """The name of a call that turns tensors into DTensors or back, or lays them anew, and its arguments behind the
    first by name; None for another call. Dynamo of torch 2.11 writes a closure over the arguments, later ones the call
    itself."""
    target = node.target
    name = target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    bare = name.removeprefix("prim").strip(" _")
    if bare not in NAMES:
        return None
    args, kwargs = node.args, dict(node.kwargs)
    if bare != name:
        held = inspect.getclosurevars(target).nonlocals
        args, kwargs = (None, *held["args_as_value"]), kwargs | held["kwargs_as_value"]
    signature = inspect.signature(getattr(DTensor, bare))
    _, *given = signature.bind(*args, **kwargs).arguments.items()
    return bare, dict(given)
