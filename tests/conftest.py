"""What all tests share. Everything in ``tests/gpu`` is marked ``gpu``; such tests skip where there is no sm_90 GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ with what the code gives now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("errors/missing_colon.txt", text)`` compares with the file under tests/golden/; with --update-golden it
    writes the file instead, and the review is a diff."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --update-golden and look at the file"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}; if it is meant, pytest --update-golden"

    return check


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
