"""The storage types of tensors: one record each, and everything else (torch, C++, DLPack) read from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DType:
    """A storage type. ``kind`` is "float", "int" or "bool"; ``dlpack`` is the (type code, bits) of DLDataType."""

    name: str
    bits: int
    kind: str
    cpp: str
    torch: str
    dlpack: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.bits // 8

    def __str__(self) -> str:
        return self.name


# DLPack type codes (dlpack.h, DLDataTypeCode): 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 float8_e4m3fn,
# 12 float8_e5m2.
TABLE = {
    d.name: d
    for d in (
        DType("f32", 32, "float", "float", "float32", (2, 32)),
        DType("f16", 16, "float", "coda::f16", "float16", (2, 16)),
        DType("bf16", 16, "float", "coda::bf16", "bfloat16", (4, 16)),
        DType("f8e4m3", 8, "float", "coda::f8e4m3", "float8_e4m3fn", (10, 8)),
        DType("f8e5m2", 8, "float", "coda::f8e5m2", "float8_e5m2", (12, 8)),
        DType("i64", 64, "int", "int64_t", "int64", (0, 64)),
        DType("i32", 32, "int", "int32_t", "int32", (0, 32)),
        DType("s8", 8, "int", "int8_t", "int8", (0, 8)),
        DType("bool", 8, "bool", "bool", "bool", (6, 8)),
    )
}

F32, F16, BF16 = TABLE["f32"], TABLE["f16"], TABLE["bf16"]
F8E4M3, F8E5M2 = TABLE["f8e4m3"], TABLE["f8e5m2"]
I64, I32, S8, BOOL = TABLE["i64"], TABLE["i32"], TABLE["s8"], TABLE["bool"]


def torch_dtype(dtype: DType) -> Any:
    """The torch.dtype of a storage type (imports torch)."""
    import torch

    return getattr(torch, dtype.torch)


def from_torch(dtype: Any) -> DType | None:
    """The storage type of a torch.dtype, or None where the language has none."""
    name = str(dtype).removeprefix("torch.")
    return next((d for d in TABLE.values() if d.torch == name), None)
