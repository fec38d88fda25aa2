"""GPU tests may run in several processes at once: none keeps memory that it does not use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def return_memory() -> Iterator[None]:
    yield
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
