"""The version, in one place: pyproject.toml, ``coda version`` and artifacts read it from here."""

__version__ = "0.1.0"
