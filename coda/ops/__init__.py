"""The operation table. Importing this package registers every family."""

from coda.ops import calls, indexing, pointwise, reduce, structure
from coda.ops.table import OPS, Op, OpError, broadcast, build, rebuild

__all__ = [
    "OPS", "Op", "OpError", "broadcast", "build", "calls", "indexing", "pointwise", "rebuild", "reduce", "structure",
]  # fmt: skip
