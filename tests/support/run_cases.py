"""Run many command lines in one interpreter; reads and writes JSON."""

import contextlib
import io
import json
import os
import sys
import traceback

from sparsepretrain.cli import main


def run(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except BaseException:
            code = traceback.format_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "made": os.listdir(".")}


if __name__ == "__main__":
    json.dump([run(argv) for argv in json.load(sys.stdin)], sys.stdout)
