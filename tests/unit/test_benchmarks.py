"""The statistics, the result files and the README's table, without a GPU."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from benchmarks import loss, records, table
from benchmarks.run import wide
from benchmarks.workloads import WORKLOADS, operands, relative_errors


def row(impl: str, ratio: float, tile: str | None = None) -> records.Row:
    quartiles = (ratio, ratio)
    return records.Row("gemm", "forward", None, 8, 16, 32, "bf16", impl, tile, ratio, ratio, quartiles, 9, 1e-3)


def test_result_file_has_the_agreed_layout(tmp_path):
    path = records.write([row("coda", 1.0, "128x128")], "NVIDIA H200", {"torch": "2"}, "run", tmp_path)
    document = json.loads(path.read_text())
    assert set(document) == {"device", "versions", "date", "command", "rows"}
    wanted = {"workload", "phase", "model", "M", "N", "K", "dtype", "impl", "tile", "median_ms", "ratio", "rounds"}
    assert wanted <= set(document["rows"][0])
    assert "nvidia-h200" in path.name
    assert records.read_all(tmp_path) == [document]


def test_table_shows_the_best_tile_of_the_newest_run(tmp_path):
    def document(date: str, *rows: records.Row) -> dict:
        return {"device": "GPU", "versions": {"torch": "2"}, "date": date, "rows": [vars(r) for r in rows]}

    old = document("2026-01-01", row("coda", 0.5, "128x192"))
    tiles = row("coda", 1.02, "128x160"), row("coda", 1.01, "128x128")
    new = document("2026-01-02", *tiles, row("torch.compile", 1.2), row("cublas", 1.0))
    text = table.table([old, new])
    assert "| M, N, K | cuBLAS, ms | gemm |" in text
    assert "| 8, 16, 32 | 1.000 | 1.010 / 1.200 |" in text
    assert table.table([]) == table.NOTHING


def test_table_of_a_model_has_a_line_for_each_item_and_the_best_of_each_peer():
    def of_a_model(impl: str, ratio: float, workload: str, n: int = 16) -> dict:
        return {**vars(row(impl, ratio)), "model": "Llama", "workload": workload, "N": n}

    rows = [of_a_model("cublas", 1.0, "down"), of_a_model("quack", 1.06, "down"), of_a_model("quack", 1.04, "down"),
            of_a_model("coda", 1.01, "down"), of_a_model("coda", 1.02, "block", 0)]  # fmt: skip
    documents = [{"device": "GPU", "versions": {"torch": "2"}, "date": "2026-01-01", "rows": rows}]
    text = table.model_table(documents)
    assert "| | M, N, K | products, ms | coda | quack |" in text
    assert "| down | 8, 16, 32 | 1.000 | 1.010 | 1.040 |" in text
    assert "| block, forward | 8 | - | 1.020 | - |" in text
    assert table.table(documents) == table.NOTHING


def test_table_of_whole_models_has_a_line_for_each_way():
    def step(phase: str, impl: str, ms: float) -> dict:
        return {"phase": phase, "impl": impl, "model": "Llama", "layers": 2, "tokens": 64, "median_ms": ms,
                "tokens_per_s": 64e3 / ms, "host_ms": 1.25, "peak_bytes": 3 << 29}  # fmt: skip

    head = {"device": "GPU", "versions": {"torch": "2"}, "date": "2026-01-01"}
    old = {**head, "rows": [step("training", "coda", 9.0)]}
    new = {**head, "rows": [step("training", "coda", 8.0), step("prefill", "coda", 2.0), step("prefill", "eager", 4.0)]}
    text = table.step_table([old, new])
    assert "Llama of transformers, 2 layers, 64 tokens, on GPU" in text
    assert "| coda | 8.0 | 8.0 | 1.2 | 1.50 | 2.0 | 32.0 | 1.2 | 1.50 |" in text
    assert "| eager | - | - | - | - | 4.0 | 16.0 | 1.2 | 1.50 |" in text


def test_readme_shows_what_the_result_files_say():
    assert table.main(["--check"]) == 0


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda w: w.name)
def test_eager_torch_is_near_its_own_float64(workload):
    inputs = [operands(24, workload.columns or 16, 32, seed=0, device="cpu")[name] for name in workload.operands]
    want = workload.math(*map(wide, inputs))
    assert max(relative_errors(workload.math(*inputs), want)) < 1e-2


def test_partial_statistics_are_summed_and_unwritten_elements_show():
    want = (torch.tensor([3.0, 5.0], dtype=torch.float64),)
    assert relative_errors((torch.tensor([[1.0, 2.0], [2.0, 3.0]]),), want) == [0.0]
    assert relative_errors((torch.tensor([3.0, float("nan")]),), want)[0] != 0.0


def test_the_loss_is_measured_by_what_it_runs():
    """The kernels that are built ahead are those of the calls; candidates agree with float64."""
    found = list(loss.programs())
    assert [(p.name.removeprefix("linear_cross_entropy"), chunk) for p, chunk in found] == [
        ("", None), ("", None), ("_backward", "V"), ("", None), ("_backward", "V")
    ]  # fmt: skip
    x, w, target = torch.randn(6, 16).bfloat16(), torch.randn(40, 16).bfloat16() / 4, torch.randint(40, (6,))
    want = loss.results(loss.eager, (x.double(), w.double(), target))
    for memory in loss.MODES:
        call = partial(loss.linear_cross_entropy, memory=memory)
        assert max(loss.relative(loss.results(call, (x, w, target)), want)) < 1e-2
        assert loss.call_of(call, loss.FORWARD, (x, w, target))() == pytest.approx(want[0].item(), rel=1e-2)
    if not torch.cuda.is_available():
        assert loss.main(["--rounds", "1"]) == 2
