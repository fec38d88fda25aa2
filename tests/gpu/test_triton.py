"""Calls of Triton kernels in a model that torch.compile gives to coda."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import coda.pytorch  # noqa: F401  (the backend, also where coda is not installed)

pytestmark = pytest.mark.gpu
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def doubled(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + at, 2 * tl.load(x + at, at < n), at < n)


def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(x)
    doubled[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024)
    h = F.gelu(F.linear(y, w, b))
    doubled[(triton.cdiv(h.numel(), 1024),)](h, h, h.numel(), 1024)
    return F.linear(h, w.T)


def test_products_before_and_behind_a_triton_kernel_see_what_it_writes() -> None:
    x, w, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((96, 128), (256, 128), (256,)))
    with torch.no_grad():
        want = call(x, w, b)
        got = torch.compile(call, backend="coda")(x, w, b)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
