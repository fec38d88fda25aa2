"""Each test compiles from nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from coda.pytorch import report


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def reports() -> Iterator[list[report.Report]]:
    """The reports of the graphs that a test compiles."""
    with report.listening() as found:
        yield found
