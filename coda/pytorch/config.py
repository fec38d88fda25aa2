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
    "fuse_loss": (False, True, "fast", "low"),
    "mode": (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
}


@dataclass(frozen=True)
class Config:
    """``numerics``: "fused" rounds where the model says so, "eager" where eager PyTorch rounds. ``layout``: "copy" may
    copy an operand that a kernel cannot read in place, "strict" raises. ``fallback``: what becomes of a product
    that is not fused, "inductor", or "error" to be told. ``verbose``: print the report. ``inductor=False``: run
    what is not fused by AOT autograd alone. ``kernels``: fuse only what becomes kernels, also where the operands
    are on a CPU. ``tune``: measure each kernel at the first sizes it meets on a GPU, beside separate kernels
    (``coda.tuning``), which takes minutes; what was measured before is used in any case. ``fuse_loss``: a cross
    entropy whose logits nothing else reads becomes one operation with their product, True or "fast" with logits
    kept for the backward, "low" with none (``coda.nn.functional.linear_cross_entropy``). ``mode``: Inductor's,
    which ``torch.compile`` does not take together with options; "reduce-overhead" replays CUDA graphs.
    """

    numerics: str = "fused"
    tune: bool = False
    layout: str = "copy"
    fuse_loss: bool | str = False
    fallback: str = "inductor"
    verbose: bool = False
    inductor: bool = True
    kernels: bool = False
    mode: str | None = None

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
