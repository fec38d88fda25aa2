"""An element of a tensor of a graph, as far as its position says what it is.

Tensors that are made from positions alone (``arange``, comparisons, views, tables read at positions) are functions of
their indices. ``Elements.at`` evaluates one at symbolic indices, operation by operation: an integer is an expression,
affine in the indices; a bool or a float is a number; and what depends on data is None, not known, as is what follows
from it, but for ``False and`` something not known.

A comparison of integers is decided where it has one outcome in all of a region. An affine function is least and
greatest at corners of a region, so these decide; the sizes in them may be symbols with known bounds.
"""

from __future__ import annotations

from coda.pytorch.elements import rules
from coda.pytorch.elements.evaluate import Elements, Region

__all__ = ["Elements", "Region", "rules"]
