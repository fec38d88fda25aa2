"""coda: tensor math of Transformers, lowered to fused CUTLASS GEMM epilogues.

>>> import coda
>>> f = coda.compile("examples/bias_gelu.coda")   # program text or a path
>>> y = f(x, w, bias)                             # torch tensors; on a CPU the reference interpreter runs

Importing this package imports neither torch nor the compiler: names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coda.errors import CodaError
from coda.version import __version__

if TYPE_CHECKING:
    from coda.ir import Program
    from coda.pytorch import explain, optimize
    from coda.runtime.api import compile, load, parse
    from coda.runtime.callable import CompiledProgram
    from coda.runtime.externs import register

_LAZY = {
    "CompiledProgram": "coda.runtime.callable",
    "Program": "coda.ir",
    "compile": "coda.runtime.api",
    "explain": "coda.pytorch",
    "load": "coda.runtime.api",
    "optimize": "coda.pytorch",
    "parse": "coda.runtime.api",
    "register": "coda.runtime.externs",
}

__all__ = [
    "CodaError", "CompiledProgram", "Program", "__version__", "compile", "explain", "load", "optimize", "parse",
    "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'coda' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
