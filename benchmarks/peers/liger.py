"""Liger-Kernel: Triton kernels between products of cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import Candidate
from benchmarks.models import EPS, Item, Model


def offer(item: Item, model: Model) -> Iterator[Candidate]:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.rope import rope_forward
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward, swiglu_fused_gate_up_forward

    def residual_norm(x: Mapping[str, Tensor]) -> Any:
        n, h, *_ = fused_add_rms_norm_forward(x["a"] @ x["b"].T, x["residual"], x["gamma"], EPS, 0.0, "llama")
        return {"n": n, "h": h}

    def swiglu(x: Mapping[str, Tensor]) -> Any:
        z, y = swiglu_fused_gate_up_forward(x["a"] @ x["b"].T)
        return {"y": y, "z": z}

    def swiglu_backward(x: Mapping[str, Tensor]) -> Any:  # the activation is kept, not computed again
        return {"dz": swiglu_fused_gate_up_backward(x["z"], x["a"] @ x["b"])}

    def rope(x: Mapping[str, Tensor]) -> Any:
        z = (x["a"] @ x["b"].T).view(1, len(x["a"]), -1, model.head_dim)
        q, k, v = z.split([model.heads, model.kv_heads, model.kv_heads], 2)
        q, k, *_ = rope_forward(q.transpose(1, 2), k.transpose(1, 2), x["c"], x["s"])
        return {"q": q.transpose(1, 2)[0], "k": k.transpose(1, 2)[0], "v": v[0].contiguous()}

    functions: dict[str, Callable[[Mapping[str, Tensor]], Any]] = {
        "out_proj": residual_norm, "down": residual_norm, "gate_up": swiglu, "qkv": rope, "down_dgrad": swiglu_backward
    }  # fmt: skip
    if item.name in functions:
        prepare = _tables if item.name == "qkv" else lambda x: x
        yield Candidate("liger", functions[item.name], lambda got, _: got, prepare=prepare)


def _tables(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rotary tables as Liger takes them: gathered, for both halves, in bf16."""
    c, s = (torch.cat([x[n], x[n]], -1)[x["pos"].long()][None].to(x["a"].dtype) for n in ("cos", "sin"))
    return {**x, "c": c, "s": s}
