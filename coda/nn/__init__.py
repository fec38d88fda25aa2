"""Functions for those who do not compile a whole model: ``coda.nn.functional``."""
