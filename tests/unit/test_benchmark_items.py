"""The items of a Llama layer without a GPU: torch's math, coda's kernels, the protocol of the processes."""

from __future__ import annotations

import io
import json

import pytest

import coda
from benchmarks import block, candidates, items, ours, train_small, worker
from benchmarks.models import ITEMS, MODELS, Model
from benchmarks.peers import torch_math
from coda.target.blocks import lower_kernel

TINY = Model("tiny", 64, 96, 4, 2, 16, 512)


@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda i: i.name)
def test_eager_math_passes_its_own_gate(item):
    for candidate in torch_math.offer(item, TINY):
        if candidate.impl == "eager":
            assert 0 < candidates.check(candidate, item, TINY, 24, "cpu") < 1e-2


def test_a_wrong_candidate_is_not_timed():
    item = ITEMS["out_proj"]
    eager = next(iter(torch_math.offer(item, TINY)))
    wrong = candidates.Candidate("wrong", lambda x: {"h": x["residual"]}, eager.results)
    with pytest.raises(candidates.NotTimed, match="h: error"):
        candidates.check(wrong, item, TINY, 24, "cpu")


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_every_item_has_kernels_of_its_own_in_the_block(model):
    kernels = ours.kernels(model)
    assert set(kernels) == set(ITEMS)
    for name, item in ITEMS.items():
        assert all(k.name for k in kernels[name])
        if item.layout != "tn":
            (kernel,) = kernels[name]
            assert lower_kernel(kernel).columns is not None


def test_a_process_answers_each_request_and_survives_a_bad_one():
    class Fake:
        def round(self, model: str) -> dict:
            return {"times": [1.0] if model == "known" else {}[model]}

    requests = [{"do": "round", "model": "known"}, {"do": "round", "model": "other"}, {"do": "nothing"}]
    answers = io.StringIO()
    worker.serve(Fake(), io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), answers)
    first, second, third = map(json.loads, answers.getvalue().splitlines())
    assert first == {"times": [1.0]}
    assert "KeyError" in second["error"] and "nothing" in third["error"]


def test_the_block_and_its_backward_agree_with_autograd(capsys):
    """In the interpreter: names, merged weights and gradients of benchmarks.block."""
    programs = {phase: coda.compile(p, device="cpu") for phase, p in ours.block(TINY).items()}
    block.check(TINY, programs, rows=24, device="cpu")
    inference, backward = capsys.readouterr().out.strip().splitlines()
    assert "inference: 4 results checked" in inference
    assert "backward: 12 results checked" in backward


def test_training_compares_distances_from_f32():
    """Tiny, on the CPU: same weights and batches for each way, so that f32 is no distance from itself."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1}  # fmt: skip
    f32, again, bf16 = (train_small.train(way, sizes, 2, 3, 2, 16, "cpu") for way in ("f32", "f32", "eager"))
    assert f32 == again != bf16
    assert train_small.train("f32", sizes, 2, 3, 2, 16, "cpu", seconds=0) == f32[:1]
    result = train_small.compare({"f32": f32, "eager": bf16, "coda": bf16})
    assert result["ratio"] == 1.0 and 0 < result["mean"]["coda"] < 0.1


def test_the_better_half_of_each_implementation_goes_on():
    offered = [["cublas", None, 0], ["coda", "a", 0], ["coda", "b", 0], ["quack", "a", 0], ["coda", "c", 0]]
    laps = [{0: 1.0, 1: 1.1, 2: 1.0, 3: 2.0, 4: 1.3}, {0: 2.0, 1: 2.2, 2: 2.1, 3: 2.2, 4: 2.6}]
    assert items.better_half(offered, range(5), laps) == [0, 1, 2, 3]
    laps += [{0: 1.0, 1: 0.9, 2: 1.1, 3: 1.0}, {0: 1.0, 1: 0.9, 2: 1.1, 3: 1.0}]
    assert items.better_half(offered, [0, 1, 2, 3], laps) == [0, 1, 3]
    assert items.better_half(offered, [0, 1, 3], laps) == [0, 1, 3]
