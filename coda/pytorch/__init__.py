"""coda under torch.compile: ``torch.compile(model, backend="coda")`` on models nobody changed.

graph.py      the captured graph, before autograd: ATen operations; casts of autocast (autocast.py) and products of
              complex numbers (complex.py) are written out; aliases.py: what shares memory, and what writes it
masks.py      attention masks that need no tensor, by what their elements say (elements/)
regions.py    sets of operations around products, between the attentions
translate.py  a region as a program (aten/: what each operation computes; cells.py: names for dims)
rewrite.py    regions become calls of one custom op (op.py, block.py, execute.py, bound.py)
backend.py    the backend and its options (config.py); report.py and model.py say what was fused and what not

Importing this package registers the backend, as the entry point of the installed distribution does.
"""

from __future__ import annotations

from torch._dynamo import list_backends, register_backend

from coda.pytorch.backend import coda
from coda.pytorch.model import ModelReport, explain, optimize

__all__ = ["ModelReport", "coda", "explain", "optimize"]

if "coda" not in list_backends(exclude_tags=()):
    register_backend(coda, name="coda")
