"""Why something stays with Inductor, as a sentence."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """An operation, or a region, that does not become a program; ``node`` is the operation where it is one."""

    def __init__(self, message: str, node: Any = None):
        super().__init__(message)
        self.node = node


class NoKernel(Refusal):
    """A region that is a program, but one without kernels."""
