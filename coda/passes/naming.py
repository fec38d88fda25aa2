"""New names for parameters, outputs and axes of derived programs."""

from __future__ import annotations

from collections.abc import Mapping

from coda.dtypes import TABLE
from coda.frontend.builtins import BUILTINS
from coda.frontend.syntax import KEYWORDS
from coda.ir import Node, Program


def taken_names(program: Program) -> set[str]:
    """What a new name must not meet: parameters, outputs, axes and their size symbols."""
    taken = {p.name for p in program.params} | {o.name for o in program.outputs}
    for axis in program.axes:
        taken |= {axis.name, *(s.name for s in axis.size.free_symbols)}
    return taken


def source_name(value: Node, names: Mapping[Node, str]) -> str | None:
    """What the source calls a value, or the one that it is the rounding or another view of."""
    while value not in names and value.op in ("cast", "transpose", "layout"):
        (value,) = value.args
    return names.get(value)


class Fresh:
    """Gives each name once: d_x, else d_x_2, d_x_3 ..."""

    def __init__(self, taken: set[str]):
        self.taken = taken | KEYWORDS | set(TABLE) | set(BUILTINS)

    def __call__(self, stem: str) -> str:
        name, n = stem, 1
        while name in self.taken:
            n += 1
            name = f"{stem}_{n}"
        self.taken.add(name)
        return name
