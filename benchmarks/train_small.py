"""Train a small Llama on real text, in f32, in bf16 by eager PyTorch and in bf16 by coda: is coda further from f32?

    python -m benchmarks.train_small                # three processes on one GPU; minutes on an H200

The model is Hugging Face's Llama of about 100 million parameters, unmodified, attention from torch, on bytes: the text
is the source of Python's own standard library. Each way starts from the same weights and sees the same batches. bf16
means weights, activations and gradients in bf16 with an f32 copy of the weights for AdamW, as in mixed precision
training. What is compared is the mean over seeds and steps of |loss - loss in f32|.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import coda.pytorch  # noqa: F401  (the backend, also where coda is not installed)
from benchmarks.records import RESULTS
from benchmarks.run import ROOT, device_name, versions

WAYS = ("f32", "eager", "coda")
LIMIT = 1.1  # how much further from f32 coda may be than eager bf16
SMALL = {"hidden_size": 768, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 12,
         "num_key_value_heads": 4}  # fmt: skip
LEARNING_RATE, WARMUP, CLIP = 6e-4, 30, 1.0


def text(limit: int = 8 << 20) -> Tensor:
    """The sources of the standard library, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = (p.read_bytes() for p in sorted(folder.rglob("*.py")) if "site-packages" not in p.parts)
    data = bytearray()
    for content in files:
        data += content
        if len(data) >= limit:
            break
    return torch.frombuffer(data, dtype=torch.uint8)


def batches(data: Tensor, seed: int, steps: int, batch: int, length: int) -> Iterator[Tensor]:
    """Windows of text at random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - length, (batch,), generator=generator)
        yield torch.stack([data[s : s + length] for s in starts.tolist()]).long()


def model_of(sizes: dict[str, int], seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, vocab_size=256, max_position_embeddings=2048, attn_implementation="sdpa",
                         use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config)


def train(
    way: str,
    sizes: dict[str, int],
    seeds: int,
    steps: int,
    batch: int,
    length: int,
    device: str,
    compiler: dict[str, Any] | None = None,
    seconds: float = float("inf"),
) -> list[list[float]]:
    """The losses of every step, for each seed, or for those that end within so many seconds."""
    start = time.monotonic()
    dtype = torch.float32 if way == "f32" else torch.bfloat16
    model = model_of(sizes, 0).to(device, dtype)
    call: Callable[..., Any] = torch.compile(model, backend="coda", **(compiler or {})) if way == "coda" else model
    data, found = text(), []
    for seed in range(seeds):
        if seed and (time.monotonic() - start) * (seed + 1) / seed > seconds:
            break
        initial = [p.detach().to(device) for p in model_of(sizes, seed).parameters()]
        found.append(run(model, call, initial, batches(data, seed, steps, batch, length), device))
    return found


def run(
    model: torch.nn.Module, call: Callable[..., Any], weights: list[Tensor], batches: Iterator[Tensor], device: str
) -> list[float]:
    """Train from the f32 weights given; AdamW works on these, the model on copies in its own dtype."""
    parameters = list(model.parameters())
    masters = [w.clone().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(
        masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    losses = []
    for step, ids in enumerate(batches):
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        ids = ids.to(device)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        losses.append(loss.detach())
    return [float(x) for x in losses]


def compare(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The mean distance from f32 of both ways in bf16, for each seed and over all, and the ratio of the two."""

    def distance(way: str, seed: int) -> float:
        return statistics.mean(abs(a - b) for a, b in zip(losses[way][seed], losses["f32"][seed], strict=True))

    seeds = range(min(map(len, losses.values())))  # that all have seen
    by_seed = {way: [distance(way, s) for s in seeds] for way in ("eager", "coda")}
    mean = {way: statistics.mean(values) for way, values in by_seed.items()}
    return {"by_seed": by_seed, "mean": mean, "ratio": mean["coda"] / mean["eager"], "limit": LIMIT}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process; prints its losses as JSON")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=600, help="of training; what is left then is left out")
    parser.add_argument("--length", type=int, default=512, help="bytes of a sequence")
    parser.add_argument("--out", type=Path, default=RESULTS / "training", help="folder of the JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks.train_small trains on a GPU, and there is none here", file=sys.stderr)
        return 2
    options = [f"--{name}={getattr(args, name)}" for name in ("steps", "seeds", "batch", "length", "seconds")]
    if args.way:
        sizes = SMALL, args.seeds, args.steps, args.batch, args.length
        print(json.dumps(train(args.way, *sizes, "cuda", seconds=args.seconds)))
        return 0
    start = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.train_small", *options]
    processes = {
        way: subprocess.Popen([*command, "--way", way], cwd=ROOT, stdout=subprocess.PIPE, text=True) for way in WAYS
    }
    losses: dict[str, list[list[float]]] = {}
    for way, process in processes.items():
        output, _ = process.communicate()
        if process.returncode:
            print(f"{way} failed with status {process.returncode}", file=sys.stderr)
            return 1
        losses[way] = json.loads(output.splitlines()[-1])
        last = statistics.mean(run[-1] for run in losses[way])
        print(f"{way}: last loss {last:.4f}, after {time.monotonic() - start:.0f} s", flush=True)
    result = compare(losses)
    print(json.dumps(result, indent=1))
    now = datetime.now(timezone.utc)
    document = {"device": device_name(), "versions": versions(), "date": now.isoformat(timespec="seconds"),
                "command": " ".join(["python", *command[1:]]), "model": SMALL, **result,
                "losses": {w: [[round(x, 5) for x in run] for run in runs] for w, runs in losses.items()}}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{now:%Y-%m-%d-%H%M%S}.json").write_text(json.dumps(document) + "\n")
    return int(result["ratio"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
