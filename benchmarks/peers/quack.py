"""QuACK: CUTLASS kernels in CuTe DSL. Each operation is offered at the configurations that its own tuner chooses among
most often; gate and up lie in alternate columns there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import eager
from benchmarks.candidates import Candidate
from benchmarks.models import EPS, Item, Model

# TileM, TileN, ping-pong; clusters of two along M
CONFIGURATIONS = ((128, 128, True), (128, 160, True), (128, 192, True), (192, 128, True), (256, 128, False),
                  (128, 256, False))  # fmt: skip


def offer(item: Item, model: Model) -> Iterator[Candidate]:
    from quack import gemm_interface as quack

    def residual_norm(x: Mapping[str, Tensor]) -> Any:
        h = torch.empty_like(x["residual"])
        scaled, r = quack.gemm_rms(x["a"], x["b"].T, C=x["residual"], norm_weight=x["gamma"], premult_out=h, eps=EPS)
        return h, scaled, r

    def swiglu(x: Mapping[str, Tensor]) -> Any:
        return quack.gemm_norm_act(x["a"], x["weight"].T, rstd=x["r"], activation="swiglu", store_preact=True)

    def swiglu_backward(x: Mapping[str, Tensor]) -> Any:
        dz, y = torch.empty_like(x["z"]), x["z"].new_empty(len(x["z"]), model.ffn)
        dr = quack.gemm_dgated_out(
            x["a"], x["b"], x["z"], dz, y, None, "swiglu", colvec_reduce=True, dynamic_scheduler=False
        )
        return dz, y, dr

    def plain(x: Mapping[str, Tensor]) -> Any:
        a, b = {"nt": (x["a"], x["b"].T), "nn": (x["a"], x["b"]), "tn": (x["a"].T, x["b"])}[item.layout]
        return {"y": quack.gemm(a, b)}

    if item.name in ("out_proj", "down"):
        yield from tuned("quack", quack._gemm_rms_tuned, residual_norm, _norm)
    elif item.name == "gate_up":
        yield from tuned("quack", quack.gemm_norm_gated_tuned, swiglu, gated, interleave, _swiglu)
    elif item.name == "down_dgrad":
        yield from tuned("quack", quack.gemm_dgated_tuned, swiglu_backward, _gradients, _keep, _swiglu_backward)
    elif item.name == "lm_head":
        yield Candidate("quack", _loss(), lambda got, _: {"loss": got})
    elif item.name.endswith("wgrad") or item.name == "out_proj_dgrad":
        yield from tuned("quack", quack.gemm_tuned, plain, lambda got, _: got)


def _keep(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return x


def tuned(
    impl: str,
    tuner: Any,
    run: Callable[[Mapping[str, Tensor]], Any],
    results: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]],
    prepare: Callable[[dict[str, Tensor]], dict[str, Tensor]] = _keep,
    reference: Callable[..., Mapping[str, Tensor]] | None = None,
) -> Iterator[Candidate]:
    """A candidate for each configuration: with one to choose from the tuner runs it and measures nothing."""
    from quack.autotuner import AutotuneConfig
    from quack.gemm_config import GemmConfig

    def at(only: Any, x: Mapping[str, Tensor]) -> Any:
        tuner.configs = [only]
        return run(x)

    for tile_m, tile_n, pingpong in CONFIGURATIONS:
        if tile_m == 192 and "gated" in tuner.fn.__name__:
            continue  # its tuner does not offer it, for it may end the process
        config = GemmConfig(tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, is_dynamic_persistent=False)
        name = f"{tile_m}x{tile_n}" + ("" if pingpong else "_coop")
        yield Candidate(impl, partial(at, AutotuneConfig(config=config)), results, name, prepare, reference)


def compile_ahead(calls: Iterable[Callable[[], Any]]) -> None:
    """Compile what these calls need on several cores; without it each would compile its own kernel when it runs."""
    from quack.cache.async_compile import CompilePending, pool_scope

    with pool_scope() as pool:
        waiting = []
        for call in calls:
            try:
                call()
            except CompilePending as pending:
                waiting.append(pending.sha)
            except Exception:  # the call itself will say so
                continue
        while any(pool.poll(sha)[0] == "pending" for sha in waiting):
            time.sleep(0.05)


def _norm(got: Any, x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    h, scaled, r = got
    return {"h": h, "n": scaled.double() * r.double()[:, None]}


def interleave(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gate and up in alternate rows of the weight."""
    gate, up = x["b"].chunk(2)
    r = 0.5 + torch.rand(len(x["a"]), device=x["a"].device)
    return {"a": x["a"], "b": x["b"], "weight": torch.stack([gate, up], 1).flatten(0, 1), "r": r}


def gated(got: Any, x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    z, y = got
    return {"y": y, "z": torch.cat([z[:, 0::2], z[:, 1::2]], -1)}


def _swiglu(a: Tensor, b: Tensor, weight: Tensor, r: Tensor) -> Mapping[str, Tensor]:
    return eager.swiglu(a, b, r)


def _gradients(got: Any, x: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    dz, y, dr = got
    return {"dz": dz, "y": y, "dr": dr}


def _swiglu_backward(a: Tensor, b: Tensor, z: Tensor) -> Mapping[str, Tensor]:
    """With gate and up in alternate columns, and the sum for the gradient of a row factor."""
    found = eager.swiglu_backward(a, b, torch.cat([z[:, 0::2], z[:, 1::2]], -1))
    wide = torch.promote_types(z.dtype, torch.float32)
    dr = (found["y"].to(wide) * (a @ b).to(wide)).sum(-1)
    return {"dz": torch.stack(found["dz"].chunk(2, -1), -1).flatten(1), "y": found["y"], "dr": dr}


def _loss() -> Callable[[Mapping[str, Tensor]], Tensor]:
    """The product by cuBLAS, then one kernel, as chunked_linear_cross_entropy has it."""
    from quack.cross_entropy import cross_entropy_fwd

    return lambda x: cross_entropy_fwd(x["a"] @ x["b"].T, x["label"])[0]
