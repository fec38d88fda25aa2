"""``python -m coda`` is the ``coda`` command."""

import sys

from coda.cli import main

sys.exit(main())
