"""The version has one home."""

import re

from coda.version import __version__


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
