"""Options of the backend, as ``torch.compile(model, backend="coda", options={...})`` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coda.errors import CodaError, did_you_mean

CHOICES = {
    "numerics": ("fused", "eager"),
    "layout": ("copy", "strict"),
    "fallback": ("inductor", "error"),
}


@dataclass(frozen=True)
class Config:
    """``numerics``: "fused" rounds where the model says so, "eager" where eager PyTorch rounds. ``tune``: measure
    kernel variants. ``layout``: "copy" may copy an operand that a kernel cannot read in place, "strict" raises.
    ``fuse_loss``: let a cross entropy join the product before it. ``fallback``: what becomes of an operation that is
    not fused, "inductor", or "error" to be told. ``verbose``: print the report. ``inductor=False``: run what is not
    fused by AOT autograd alone."""

    numerics: str = "fused"
    tune: bool = False
    layout: str = "copy"
    fuse_loss: bool = False
    fallback: str = "inductor"
    verbose: bool = False
    inductor: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Config:
        known = {f.name for f in fields(cls)}
        for name, value in (options or {}).items():
            if name not in known:
                hint = did_you_mean(name, known) or f"there are {', '.join(sorted(known))}"
                raise CodaError.of(f"backend 'coda' has no option '{name}'", hint)
            if value not in CHOICES.get(name, (True, False)):
                choices = " or ".join(repr(c) for c in CHOICES.get(name, (True, False)))
                raise CodaError.of(f"option {name}={value!r} of backend 'coda'", f"it is {choices}")
        return cls(**(options or {}))

    @property
    def layout_fallback(self) -> str:
        """The policy of ``coda.compile`` that this layout policy means."""
        return "copy" if self.layout == "copy" else "strict"
