# PYTHON_ARGCOMPLETE_OK
"""``python -m sparsepretrain``."""

import sys

from sparsepretrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
