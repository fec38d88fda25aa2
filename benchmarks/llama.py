"""A whole Llama, as transformers has it: a training step and a prefill, by eager PyTorch, Inductor, Liger and coda.

    python -m benchmarks.llama                       # Llama-3-1B, 8192 tokens; about 300 s on an H200 with 16 cores
    python -m benchmarks.llama --phase prefill --ways eager inductor coda

All ways share one set of weights (Liger, which changes the modules, has its own), are warm before the first is timed,
and take turns in a new order each round. Times are those of the clock, from an idle device to an idle device: the host
counts. Before it is timed a way is checked: no loss, gradient or logits may be further from f32 than twice eager bf16.
What a way costs to compile is told, too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import coda.pytorch  # noqa: F401  (the backend, also where coda is not installed)
from benchmarks.candidates import timing
from benchmarks.memory import peak_bytes
from benchmarks.models import EPS, MODELS, POSITIONS, Model
from benchmarks.records import RESULTS, write
from benchmarks.run import device_name, versions

WAYS = ("eager", "inductor", "max-autotune", "liger", "coda", "coda-loss", "coda-graphs")
DEFAULT = ("eager", "inductor", "liger", "coda", "coda-loss")
PHASES = ("training", "prefill")
LIMIT = 2.0  # largest error, in units of eager bf16's
Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One way in one phase. ``ratio`` is the median of per-round ratios to eager; ``host_ms`` the time until a step
    returns; ``peak_bytes`` the memory beyond weights and inputs; ``error`` that of loss and gradients in units of
    eager's."""

    phase: str
    model: str
    layers: int
    tokens: int
    impl: str
    median_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    rounds: int
    tokens_per_s: float
    host_ms: float
    peak_bytes: int
    compile_s: float
    error: float


def model_of(model: Model, layers: int, seed: int = 0) -> nn.Module:
    """The model with random weights, on the GPU in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.d, intermediate_size=model.ffn, num_hidden_layers=layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, vocab_size=model.vocab, rms_norm_eps=EPS,
        max_position_embeddings=POSITIONS, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def way_of(name: str, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
    """The module whose parameters get gradients, and what is called."""
    match name:
        case "eager":
            return model, model
        case "inductor":
            return model, torch.compile(model)
        case "max-autotune":
            return model, torch.compile(model, mode="max-autotune-no-cudagraphs")
        case "coda":
            return model, torch.compile(model, backend="coda")
        case "coda-loss":
            return model, torch.compile(_without_logits(model), backend="coda", options={"fuse_loss": True})
        case "coda-graphs":
            return model, torch.compile(model, backend="coda", options={"mode": "reduce-overhead"})
        case "liger":
            from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
            from transformers.models.llama import modeling_llama

            changed, names = copy.deepcopy(model), vars(modeling_llama)
            ours = dict(names)
            with patch.dict(names):  # Liger changes functions of transformers for all models
                _apply_liger_kernel_to_instance(changed)
                theirs = {name: value for name, value in names.items() if ours.get(name) is not value}

            def call(**inputs: Any) -> Any:
                with patch.dict(names, theirs):
                    return changed(**inputs)

            return changed, call
    raise ValueError(name)


def _without_logits(model: nn.Module) -> Callable[..., Any]:
    """The model as a function that returns no logits where it returns a loss, as Liger's does."""

    def call(**inputs: Any) -> Any:
        output = model(**inputs)
        return output if output.loss is None else SimpleNamespace(loss=output.loss)

    return call


def step_of(phase: str, module: nn.Module, call: Callable[..., Any], ids: Tensor) -> Call:
    """One step: a loss and its gradients, or the logits of the last token."""
    if phase == "prefill":

        def prefill() -> Any:
            with torch.no_grad():
                return call(input_ids=ids, logits_to_keep=1).logits

        return prefill

    def training() -> Any:
        module.zero_grad(set_to_none=True)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return training


# -- checks ----------------------------------------------------------------------------------------------------------


def results(phase: str, module: nn.Module, call: Callable[..., Any], ids: Tensor) -> list[Tensor]:
    """What a step gives, in f32: the loss and every gradient, or the logits."""
    found = [step_of(phase, module, call, ids)().float()]
    if phase == "training":
        found += [p.grad.float() for p in module.parameters() if p.grad is not None]
        module.zero_grad(set_to_none=True)
    return found


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    return [float((a - b).norm()) for a, b in zip(got, want, strict=True)]


def worst(got: Sequence[float], eager: Sequence[float], want: Sequence[Tensor]) -> float:
    """The largest error in units of eager's; what is no more than rounding of the result does not count."""
    least = torch.finfo(torch.bfloat16).eps / 8
    return max(a / max(b, least * float(w.norm()), 1e-30) for a, b, w in zip(got, eager, want, strict=True))


# -- times -----------------------------------------------------------------------------------------------------------


def clock(calls: Sequence[Call]) -> list[float]:
    """Milliseconds of each call, from an idle device to an idle device."""
    laps = []
    for call in calls:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        laps.append(1e3 * (time.perf_counter() - start))
    return laps


def host(call: Call, repeats: int = 3) -> float:
    """Milliseconds until a call returns; the least, since the queue may be full."""
    laps = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        laps.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return min(laps)


def measure(phase: str, name: str, layers: int, args: argparse.Namespace) -> list[Row]:
    model = model_of(MODELS[name], layers)
    ids = torch.randint(MODELS[name].vocab, (args.batch, args.tokens // args.batch), device="cuda")
    exact = copy.deepcopy(model).float()
    want = results(phase, exact, exact, ids)
    del exact
    eager = distance(results(phase, model, model, ids), want)
    steps, compiled, errors = dict[str, Call](), dict[str, float](), dict[str, float]()
    for way in dict.fromkeys(("eager", *args.ways)):
        try:
            start = time.perf_counter()
            module, call = way_of(way, model)
            step = step_of(phase, module, call, ids)
            clock([step, step])
            compiled[way] = time.perf_counter() - start
            errors[way] = worst(distance(results(phase, module, call, ids), want), eager, want)
        except Exception as error:  # one way that fails must not cost the others their result
            print(f"  {way}: left out, {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        print(f"  {way}: ready after {compiled[way]:.0f} s, error {errors[way]:.2f} of eager's", flush=True)
        if errors[way] <= LIMIT:
            steps[way] = step
        else:
            print(f"  {way}: not timed, it is wrong by more than {LIMIT} times eager", flush=True)
    measured = timing.interleave(steps, "eager", clock, args.rounds, args.seconds)
    rows = [
        Row(phase, name, layers, args.tokens, way, m.median_ms, m.ratio, m.ratio_quartiles, m.rounds,
            1e3 * args.tokens / m.median_ms, host(steps[way]), peak_bytes(steps[way]), compiled[way], errors[way])
        for way, m in measured.items()
    ]  # fmt: skip
    for row in rows:
        print(f"  {row.impl:13s} {row.median_ms:8.2f} ms, {row.ratio:.3f} of eager, {row.tokens_per_s:9.0f} tokens/s, "
              f"host {row.host_ms:6.2f} ms, peak {row.peak_bytes / 2**30:6.2f} GiB", flush=True)  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="Llama-3-1B")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20, help="of timing, for each phase")
    parser.add_argument("--out", type=Path, default=RESULTS / "models", help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.llama measures a GPU, and there is none here", file=sys.stderr)
        return 2
    rows = []
    for phase in args.phase:
        print(f"{args.model}, {args.layers} layers, {args.tokens} tokens, {phase}", flush=True)
        rows += measure(phase, args.model, args.layers, args)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    command = " ".join(["python", "-m", "benchmarks.llama", *(sys.argv[1:] if argv is None else argv)])
    print(write(rows, device_name(), versions(), command, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
