"""K2: a call can be captured into a CUDA graph once the device is warm, and says so when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.abi.harness import Recorder, host_only


def test_first_use_inside_a_capture_is_refused(tmp_path: Path) -> None:
    record = Recorder(host_only(tmp_path, "plain", fake=True))  # a process-wide state of its own
    args = [torch.zeros(s, dtype=torch.bfloat16) for s in ((128, 64), (64, 64), (128, 64))]
    record.reset(capturing=True)
    assert record.run(args) == 1
    assert record.error == "the first use on device 0 is inside a graph capture: call plain_warmup(0) before it"
    assert not record.calls()
    record.artifact.warmup(0)
    record.reset(capturing=True)
    assert record.run(args, stream=5) == 0, record.error
    assert [c["call"] for c in record.calls()] == ["encode", "encode", "launch"]
    assert record.calls()[-1]["stream"] == 5


@pytest.mark.gpu
def test_capture_and_replay_with_new_data() -> None:
    import coda

    linear = coda.compile("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }", fallback="strict")
    x, w = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
    linear.warmup("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, w, out=out)
    for _ in range(2):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.float(), (x.double() @ w.double().T).float(), rtol=0.02, atol=0.2)
