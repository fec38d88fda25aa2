"""Torch tensors as the DLTensor structs a C function takes.

Only pointers, sizes and strides are copied; no tensor is kept. A ``Frame`` is the memory of one thread's calls and
is filled anew by each. The C arrays of layouts seen before are reused, so a tensor costs about a microsecond.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from coda.dtypes import TABLE, DType, torch_dtype

Value: TypeAlias = "Tensor | float | int | bool | None"


class DLTensor(ctypes.Structure):
    """As in dlpack.h, with the nested DLDevice and DLDataType written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


_PACK = struct.Struct("=QiiiBBHQQQ").pack_into  # the fields above, in one call
_SIZE = ctypes.sizeof(DLTensor)
_CPU, _CUDA = 1, 2
_CODES = {torch_dtype(d): d.dlpack for d in TABLE.values() if hasattr(torch, d.torch)}
_CODES |= {torch.float64: (2, 64), torch.uint8: (1, 8), torch.int16: (0, 16)}  # refused by name
_UNKNOWN = (255, 0)
_REMEMBERED = 1024  # layouts


class Frame:
    """DLTensor structs for up to ``count`` arguments, and ``pointers``: the array of pointers to them."""

    def __init__(self, count: int):
        self.tensors = (DLTensor * count)()
        self.pointers = (ctypes.c_void_p * count)()
        self._data = memoryview(self.tensors).cast("B").cast("Q")[:: _SIZE // 8]  # the first field of each struct
        self._addresses = [ctypes.addressof(t) for t in self.tensors]
        self._scalars: list[Tensor | None] = [None] * count  # made from Python numbers; never a caller's tensor
        self._layouts: dict[tuple, tuple[int, int, Any]] = {}

    def fill(self, args: Sequence[Value], dtypes: Sequence[DType]) -> None:
        """Point to these arguments. ``dtypes`` are those declared, which Python numbers take."""
        if len(self._layouts) > _REMEMBERED:
            self._layouts.clear()
        for i, value in enumerate(args):
            if value is None:
                self.pointers[i] = None
                continue
            if not isinstance(value, Tensor):
                value = self._scalars[i] = torch.tensor(value, dtype=torch_dtype(dtypes[i]))
            self._pack(i, value)
            self.pointers[i] = self._addresses[i]

    def copy(self) -> Frame:
        """The same structs in memory of their own. The arrays of sizes and strides are shared: keep this frame."""
        copy = Frame(len(self.pointers))
        ctypes.memmove(copy.tensors, self.tensors, ctypes.sizeof(self.tensors))
        for i, pointer in enumerate(self.pointers):
            copy.pointers[i] = None if pointer is None else copy._addresses[i]
        return copy

    def move(self, addresses: Sequence[int]) -> None:
        """Point each struct to another address."""
        self._data[:] = array("Q", addresses)

    def _pack(self, index: int, x: Tensor) -> None:
        key = x.shape, x.stride()
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _layout(*key)
        code, bits = _CODES.get(x.dtype, _UNKNOWN)
        device = x.get_device()  # -1: host memory
        kind, device = (_CUDA, device) if device >= 0 else (_CPU, 0)
        rank = len(key[0])
        _PACK(self.tensors, index * _SIZE, x.data_ptr(), kind, device, rank, code, bits, 1, layout[0], layout[1], 0)


def _layout(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, Any]:
    """Addresses of the C arrays of sizes and strides, and the memory that holds both."""
    arrays = (ctypes.c_int64 * max(1, 2 * len(shape)))(*shape, *strides)
    at = ctypes.addressof(arrays)
    return at, at + 8 * len(shape), arrays
