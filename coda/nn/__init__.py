"""For those who do not compile a whole model: ``coda.nn.functional``, and the loss as a module."""

from coda.nn.loss import LinearCrossEntropy

__all__ = ["LinearCrossEntropy"]
