"""What all tests share. Everything in ``tests/gpu`` is marked ``gpu``; such tests skip where there is no sm_90 GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


def has_sm90_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not has_sm90_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an sm_90 GPU"))
