"""One record for each ATen operation that is translated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from coda.pytorch.translate import Value

Handler = Callable[..., "Value"]


@dataclass(frozen=True)
class Record:
    """``translate(translator, node, *args, **kwargs)`` gives the value. ``kind`` is "pointwise", "view", "cut" (a view
    of a part), "join", "product", "norm", "reduction" or "cast". ``takes(node)`` says whether this use of the operation
    is translated."""

    translate: Handler
    kind: str
    takes: Callable[[fx.Node], bool] = lambda node: True


RECORDS: dict[str, Record] = {}


def register(kind: str, *names: str, takes: Callable[[fx.Node], bool] = lambda node: True) -> Any:
    """Register a function as the translation of ATen operations, all overloads."""

    def decorate(function: Handler) -> Handler:
        for name in names:
            RECORDS[name] = Record(function, kind, takes)
        return function

    return decorate
