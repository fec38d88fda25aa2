"""Scalar math as C++: what all kernels share, whatever visits their elements.

A ``Scope`` gives names to values as they are written; the C++ of an operation is in its record (``coda.ops``), of its
functions in ``templates/scalar.h``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coda.dtypes import DType
from coda.errors import CodaError, Diagnostic
from coda.ir import Node
from coda.ops import OPS


def cpp_type(dtype: DType) -> str:
    """The type arithmetic uses for a storage dtype."""
    if dtype.kind == "float":
        return "float"
    return {"i64": "int64_t", "bool": "bool"}.get(dtype.name, "int32_t")


def literal(value: float | int | bool, type_: str) -> str:
    """A C++ literal of an arithmetic type."""
    if type_ == "bool":
        return "true" if value else "false"
    if type_ != "float":
        return f"{type_}({int(value)})"
    value = float(value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = repr(value) if "e" in repr(value) or "." in repr(value) else repr(value) + ".0"
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def is_packed(dtype: DType) -> bool:
    """Whether a rounding to this dtype makes memory words of two columns."""
    return dtype.bits < 32 and dtype.kind != "bool"


def pack(dtype: DType, source: str, saturate: bool = False) -> str:
    """The memory word of two columns."""
    if saturate and dtype.bits == 8:
        return f"coda::pack_saturated<{dtype.cpp}>({source})"
    return f"coda::pack<{dtype.cpp}>(" + (f"coda::saturate<{dtype.cpp}>({source})" if saturate else source) + ")"


def unpack(dtype: DType, word: str) -> str:
    return _typed(dtype, f"coda::unpack<{dtype.cpp}>({word})")


def _typed(dtype: DType, floats: str) -> str:
    """Rounded values, which come as floats, in the arithmetic type of their dtype."""
    return floats if dtype.kind == "float" else f"coda::convert<{cpp_type(dtype)}>({floats})"


@dataclass
class Scope:
    """Names of values as they are written: a node is emitted once, as a constant, in dependency order."""

    names: dict[Node, str] = field(default_factory=dict)
    words: dict[Node, str] = field(default_factory=dict)  # casts in the tile: the packed memory word

    def value(self, node: Node, type_: str) -> str:
        """The node as an operand of arithmetic type ``type_``."""
        if node.op == "const":
            return literal(node.attr("value"), type_)
        name = self.names[node]
        return name if cpp_type(node.dtype) == type_ else f"coda::convert<{type_}>({name})"

    def expression(self, node: Node) -> str:
        """The C++ of one pointwise node or cast over the names of its operands."""
        if node.op in ("layout", "partial"):
            return self.names[node.args[0]]
        if node.op == "cast":
            return self._cast(node)
        if node.op == "size" and node.attr("expr").is_Integer:
            return literal(int(node.attr("expr")), "int64_t")
        record = OPS[node.op]
        if record.cpp is None:
            raise CodaError([Diagnostic(f"'{node.op}' is not lowered in this release", node.span)])
        return record.cpp.format(*self._operands(node))

    def _operands(self, node: Node) -> list[str]:
        if node.op == "where":
            result = cpp_type(node.dtype)
            return [self.value(node.args[0], "bool")] + [self.value(a, result) for a in node.args[1:]]
        if node.dtype.kind == "bool":  # a comparison: in the common type of its operands
            kinds = {cpp_type(a.dtype) for a in node.args if a.op != "const"} or {"float"}
            common = kinds.pop() if len(kinds) == 1 else "float" if "float" in kinds else "int64_t"
            if any(a.dtype.kind == "float" for a in node.args):
                common = "float"
            return [self.value(a, common) for a in node.args]
        return [self.value(a, cpp_type(OPS[node.op].operands or node.dtype)) for a in node.args]

    def _cast(self, node: Node) -> str:
        if not is_packed(node.dtype):
            return self.value(node.args[0], cpp_type(node.dtype))
        source = self.value(node.args[0], "float")
        if node.attr("saturate") and node.dtype.kind == "float":
            source = f"coda::saturate<{node.dtype.cpp}>({source})"
        return _typed(node.dtype, f"coda::round<{node.dtype.cpp}>({source})")
