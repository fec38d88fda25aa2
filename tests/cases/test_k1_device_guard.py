"""K1: a call runs on the device of its tensors, whichever is current, with that device's limits."""

from __future__ import annotations

import pytest
import torch

from tests.abi.harness import recorder


def args() -> list[torch.Tensor]:
    return [torch.zeros(s, dtype=torch.bfloat16) for s in ((8192, 64), (4096, 64), (8192, 4096))]


def test_runs_on_the_device_of_the_tensors_and_restores_the_callers() -> None:
    record = recorder("plain")
    record.reset()
    assert record.run(args(), 1) == 0, record.error
    calls = record.calls()
    launch = next(c for c in calls if c["call"] == "launch")
    assert launch["device"] == 1
    assert launch["grid"] == [2, 39, 1]  # 78 multiprocessors, where cuda:0 has 132
    assert [c["device"] for c in calls if c["call"] == "cudaSetDevice"] == [1, 0]
    assert record.library.fake_current_device() == 0


def test_mixed_devices_are_refused() -> None:
    record = recorder("plain")
    record.reset()
    assert record.run(args(), [0, 1, 0]) == 1
    assert record.error == "'w' is on cuda:1, but 'x' on cuda:0; all tensors of a call live on one device"
    assert not record.calls()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    import coda

    linear = coda.compile("program p(x: bf16[M, K], w: bf16[N, K]) { return x @ w.T: bf16 }", fallback="strict")
    x, w = (torch.randn(256, 256, device="cuda:1", dtype=torch.bfloat16) for _ in range(2))
    with torch.cuda.device(0):
        y = linear(x, w)
        assert torch.cuda.current_device() == 0
    assert y.device == x.device
    torch.testing.assert_close(y.float(), (x.double() @ w.double().T).float(), rtol=0.02, atol=0.2)
