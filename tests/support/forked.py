"""The command in a fork of a warm parent, which has imported torch once for many runs."""

import os
import sys
import traceback
from collections.abc import Callable

from sparsepretrain import cli


def main_in_child(argv: list[str], log: int, prepare: Callable[[], None]) -> None:
    """Run the command in this fork and end it.

    Args:
        argv: words of the command, without the program.
        log: file descriptor that gets everything it prints.
        prepare: called first, with its output in ``log`` too.
    """
    code = 99
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        prepare()
        code = cli.main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
