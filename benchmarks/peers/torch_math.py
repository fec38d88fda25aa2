"""Eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import eager
from benchmarks.candidates import Candidate
from benchmarks.models import Item, Model


def offer(item: Item, model: Model) -> Iterator[Candidate]:
    if item.name.endswith("wgrad") or item.name == "out_proj_dgrad":
        return  # the product alone, which is the baseline
    function = eager.math(item, model)
    yield Candidate("eager", lambda x: function(**x), lambda got, _: got)
    compiled = torch.compile(function, dynamic=False)
    yield Candidate("torch.compile", lambda x: compiled(**x), lambda got, _: got, one_shape=True)
