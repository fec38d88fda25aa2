"""Writing C++ tables: rows of constants, which refer to tensors, sizes and kernels by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coda.ir import Size
from coda.target.plan import Arg
from coda.target.requirements import Checks, Extent


@dataclass(frozen=True)
class Tables:
    """What rows refer to: sizes, tensors (arguments, then temporaries) and kernels of the cubin."""

    facts: Checks
    tensors: Sequence[str]
    kernel: Callable[[str], int]

    def extent(self, size: Size) -> str:
        return extent(self.facts.extent(size))

    def index(self, tensor: str) -> int:
        return self.tensors.index(tensor)


def extent(e: Extent) -> str:
    variable = -1 if e.variable is None else e.variable
    return f"{{{e.coefficient}, {variable}, {e.offset}}}"


def absent(arg: Arg, identity: float) -> tuple[str, int]:
    """What an argument that is not given stands for, as a float and as an integer."""
    number = identity if arg.default is None else float(arg.default)
    integer = arg.default if arg.dtype.kind == "int" and arg.default is not None else 0
    return float_literal(number), int(integer)


def table(type: str, name: str, rows: Iterable[str]) -> str:
    rows = list(rows)
    if not rows:  # C++ has no empty arrays; see reference
        return f"// no {name}"
    return f"constexpr {type} {name}[] = {{\n" + "".join(f"    {row},\n" for row in rows) + "};"


def reference(name: str, rows: Sequence[object]) -> str:
    return f"CODA_TABLE({name})" if rows else "nullptr, 0"


def string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def float_literal(value: float) -> str:
    return f"{value!r}f" if value == value and abs(value) != float("inf") else f"float({_special(value)})"


def _special(value: float) -> str:
    if value != value:
        return '__builtin_nan("")'
    return "__builtin_inf()" if value > 0 else "-__builtin_inf()"
