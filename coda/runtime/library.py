"""An artifact in this process: the C functions of ``NAME.so`` called with torch tensors.

Metadata comes from ``coda_describe``; no compiler and, but for ``run`` and ``warmup``, no GPU is needed.
"""

from __future__ import annotations

import ast
import ctypes
import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coda.dtypes import TABLE, DType
from coda.errors import CodaError
from coda.ir import Program
from coda.runtime.dlpack import Frame, Value

OK, REFUSED, CUDA_ERROR, WRONG_ARCH = range(4)
FORMAT = 3  # of the description
BAND = 16  # rows of a partial of a column reduction


class Artifact:
    """The kernels of one program. Arguments are in ABI order, parameters then outputs: tensors, None for absent ones,
    Python numbers or 0-dim CPU tensors for scalars."""

    def __init__(self, path: Path, name: str | None = None, program: Program | None = None):
        self.path = Path(path)
        self._library = _open(self.path)
        self.describe: dict[str, Any] = _description(self._library, self.path)
        self._about = _choose(self.describe["programs"], name, self.path)
        self.name: str = self._about["name"]
        self._given = program
        self._dtypes = [TABLE[a["dtype"]] for a in self._about["args"]]
        self._functions = _Functions(self._library, self.name)
        self._local = threading.local()

    @cached_property
    def program(self) -> Program:
        """The program it was lowered from."""
        if self._given is not None:
            return self._given
        from coda.errors import Source
        from coda.frontend import load

        return load(Source(self._about["program"], str(self.path))).programs[self.name]

    @property
    def args(self) -> list[dict[str, Any]]:
        """The arguments as ``coda_describe`` lists them."""
        return self._about["args"]

    def check(self, args: Sequence[Value]) -> str | None:
        """The sentence why these arguments are refused, or None. Looks at no device."""
        frame = self._frame(args)
        return self._sentence() if self._functions.check(frame.pointers, len(args)) else None

    def workspace_bytes(self, args: Sequence[Value]) -> int:
        if not self._about["workspace"]:
            return 0
        return self._functions.workspace_bytes(self._frame(args).pointers, len(args))

    def run(self, args: Sequence[Value], workspace: Tensor | None = None, stream: int | None = None) -> None:
        """Launch on a stream (by default the current one of the tensors' device). Raises CodaError for what is
        refused and RuntimeError for what CUDA reports."""
        device = next((x.device for x in args if isinstance(x, Tensor) and x.is_cuda), None)
        if device is not None and stream is None:
            stream = torch.cuda.current_stream(device).cuda_stream
        if workspace is None and device is not None and self._about["workspace"]:
            workspace = torch.empty(self.workspace_bytes(args), dtype=torch.uint8, device=device)
        at, size = (workspace.data_ptr(), workspace.nbytes) if workspace is not None else (None, 0)
        status = self._functions.run(self._frame(args).pointers, len(args), at, size, stream)
        if status != OK:
            self._raise(status)

    def prepare(self, args: Sequence[Value]) -> Prepared:
        """These arguments, as the layouts of later calls with other addresses. Scalars must be tensors."""
        return Prepared(self, args, self._dtypes)

    def warmup(self, device: torch.device | int) -> None:
        """Load the kernels on a device, so that ``run`` may be captured into a CUDA graph."""
        index = device if isinstance(device, int) else device.index
        status = self._functions.warmup(torch.cuda.current_device() if index is None else index)
        if status != OK:
            self._raise(status)

    def output_shapes(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The shape of each output for these axis sizes. Partial results have their number in front."""
        return {a["name"]: self._shape(a, sizes) for a in self.args if a["output"]}

    @property
    def tiles(self) -> list[str]:
        """The tiles that kernels were built for."""
        return list(dict.fromkeys(v["tile"] for k in self._about["kernels"] for v in k.get("variants", ())))

    @property
    def _counted(self) -> dict[str, Any]:
        """The kernel whose partial results are outputs; where there is none, the first with variants."""
        kernels = self._about["kernels"]
        chosen = self._about["partial_kernel"]
        return kernels[chosen] if chosen is not None else next(k for k in kernels if k["kind"] == "gemm")

    def variant(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The variant that runs at these sizes: as ``select`` in host/call.h."""
        kernel = self._counted
        rows, columns = (formula(kernel[key], sizes) for key in ("rows", "columns"))

        def cost(v: dict[str, Any]) -> int:
            tiles = -(-rows // v["tile_m"]) * -(-columns // v["columns"])
            return -(-tiles // self._about["design_sms"]) * v["cost"]

        return min(kernel["variants"], key=cost)

    def _shape(self, arg: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
        shape = tuple(formula(size, sizes) for size in arg["shape"])
        if arg["partials"] is None:
            return shape
        if arg["partials"] == "row":
            return (-(-formula(self._counted["columns"], sizes) // self.variant(sizes)["columns"]), *shape)
        return (-(-formula(self._counted["rows"], sizes) // BAND), *shape)

    def _frame(self, args: Sequence[Value]) -> Frame:
        """The arguments as C structs, in memory of this thread that the next call reuses."""
        frame = getattr(self._local, "frame", None)
        if frame is None:
            frame = self._local.frame = Frame(len(self._dtypes))
        if len(args) != len(self._dtypes):
            names = ", ".join(a["name"] for a in self.args)
            raise CodaError.of(f"'{self.name}' takes {len(self._dtypes)} arguments ({names}), got {len(args)}")
        frame.fill(args, self._dtypes)
        return frame

    def _sentence(self) -> str:
        return self._functions.last_error().decode()

    def _raise(self, status: int) -> None:
        text = self._sentence()
        raise RuntimeError(f"{self.name}: {text}") if status == CUDA_ERROR else CodaError.of(f"{self.name}: {text}")


class Prepared:
    """Calls whose layouts are those of one call: its structs are kept, and only addresses are written into them."""

    def __init__(self, artifact: Artifact, args: Sequence[Value], dtypes: Sequence[DType]):
        self._artifact, self._count = artifact, len(args)
        self._layouts = Frame(len(args))  # the structs point to its arrays of sizes and strides
        self._layouts.fill(args, dtypes)
        self._run = artifact._functions.run
        self._local = threading.local()

    def run(self, addresses: Sequence[int], workspace: Tensor | None, stream: int) -> None:
        """Launch on tensors at these addresses, which have the device and the layouts of the first."""
        local = self._local
        if not hasattr(local, "copy"):
            local.copy = self._layouts.copy()
        local.copy.move(addresses)
        at, size = (workspace.data_ptr(), workspace.nbytes) if workspace is not None else (None, 0)
        status = self._run(local.copy.pointers, self._count, at, size, stream)
        if status != OK:
            self._artifact._raise(status)


class _Functions:
    """The C functions of one program, typed."""

    def __init__(self, library: ctypes.CDLL, name: str):
        args = [ctypes.c_void_p, ctypes.c_int]
        self.check = _function(library, f"{name}_check", ctypes.c_int, args)
        self.workspace_bytes = _function(library, f"{name}_workspace_bytes", ctypes.c_size_t, args)
        self.warmup = _function(library, f"{name}_warmup", ctypes.c_int, [ctypes.c_int])
        memory = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self.run = _function(library, f"{name}_run", ctypes.c_int, args + memory)
        self.last_error = _function(library, "coda_last_error", ctypes.c_char_p, [])


def _function(library: ctypes.CDLL, name: str, result: Any, arguments: list[Any]) -> Any:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path.resolve()), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise CodaError.of(f"{path} is not a library that can be loaded: {error}") from None


def _description(library: ctypes.CDLL, path: Path) -> dict[str, Any]:
    try:
        text = _function(library, "coda_describe", ctypes.c_char_p, [])()
    except AttributeError:
        raise CodaError.of(f"{path} is not an artifact of coda: it has no function coda_describe") from None
    description = json.loads(text)
    if description.get("format") != FORMAT:
        raise CodaError.of(
            f"{path} has format {description.get('format')}, this coda reads {FORMAT}", "lower the program again"
        )
    return description


def _choose(programs: Sequence[dict[str, Any]], name: str | None, path: Path) -> dict[str, Any]:
    found = [p for p in programs if name in (None, p["name"])]
    if len(found) == 1:
        return found[0]
    have = ", ".join(p["name"] for p in programs)
    raise CodaError.of(f"{path} has the programs {have}", "name one of them" if name is None else f"not '{name}'")


def formula(text: str, sizes: Mapping[str, int]) -> int:
    """The value of a size formula such as ``2*F``: names, integers, + - * and ** only."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.Constant(int(number)):
                return number
            case ast.Name(name) if name in sizes:
                return int(sizes[name])
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Sub(), right):
                return value(left) - value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
            case ast.BinOp(left, ast.Pow(), right):
                return value(left) ** value(right)
        raise CodaError.of(f"the size {text} cannot be computed from {', '.join(sizes)}")

    return value(ast.parse(text, mode="eval"))
