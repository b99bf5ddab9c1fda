import io
import re
import subprocess
import sys
import warnings

import pytest

from sparsepretrain.console import Console, clock, count, describe, significant
from sparsepretrain.data.preparation import Progress
from sparsepretrain.errors import SparsePretrainWarning, own_warnings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(phase: str, done: int, total: int | None, unit: str = "tokens", **more: int) -> Progress:
    return Progress(phase=phase, done=done, total=total, unit=unit, seconds=2.0, **more)


def line(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "time": 2.0 * step, "loss": 1.5, "lr": 1e-3, **values}


SIGNIFICANT = {2.0766688: "2.0767", 50257.4: "50257", 1.2e-6: "1.2000e-06", 0.0: "0.0000"}
COUNTS = {0: "0", 999: "999", 999.6: "1.00k", 12345: "12.3k", 99960: "100k", 999_960: "1.00M"}
CLOCK = {0: "0:00", 59.6: "1:00", 3600: "1:00:00", 9e4: "1d 01:00:00"}


@pytest.mark.parametrize(
    ("show", "texts"), [(significant, SIGNIFICANT), (count, COUNTS), (clock, CLOCK)]
)
def test_numbers_are_short(show, texts):
    assert {number: show(number) for number in texts} == texts


def test_plain_lines_align_and_show_the_remaining_time():
    out = io.StringIO()
    console = Console(out)
    console.step(line(9, tokens_per_second=900.0), 100)
    console.step(line(10, flip_rate=0.0123, tokens_per_second=12345.0), 100)
    first, second = out.getvalue().splitlines()
    assert first.startswith("step   9/100  loss 1.5000  flip       –")
    shown = "step  10/100  loss 1.5000  flip 1.2e-02  lr 1.00e-03  12.3k tokens/s  ETA 3:00"
    assert second == shown
    assert first.index("tokens/s") == second.index("tokens/s")
    resumed = io.StringIO()
    console = Console(resumed)
    console.unit = "images"
    console.step({"step": 500, "time": 7.0, "loss": 1.0, "tokens_per_second": 100.0}, 1000)
    console.step({"step": 510, "time": 17.0, "loss": 1.0}, 1000)
    first, second = resumed.getvalue().splitlines()
    assert "ETA" not in first and "100 images/s" in first
    assert second.endswith("ETA 8:10")  # 1 s per step, 490 steps


def test_phase_switch_has_its_own_line():
    out = io.StringIO()
    console = Console(out)
    watched = {"autoswitch_z": 9.9e-9, "autoswitch_threshold": 1e-8}
    dense, sparse = {"sparse": 0.0}, {"sparse": 1.0, **watched}
    for step, values in enumerate([dense, {}, dense, sparse, {}, dense], 1):
        console.step(line(step, **values), 9)
    console.step({"step": 6, "split": "validation", "loss": 2.0}, 9)
    switches = [text for text in out.getvalue().splitlines() if "from here on" in text]
    to_sparse = "step 4/9  sparse from here on (AutoSwitch: Z̄ 9.90e-09, ε 1.00e-08)"
    assert switches == [to_sparse, "step 6/9  dense from here on"]


def test_evaluations_and_missing_losses():
    out = io.StringIO()
    Console(out).step({"step": 5, "split": "validation", "time": 1.0, "loss": 2.0, "bleu": 27.1}, 9)
    assert out.getvalue() == "step 5/9  validation  loss 2.0000  bleu 27.100\n"
    assert describe({"loss": None}, None).startswith("loss    nan")
    assert describe({"loss": 1.0, "mfu_dense": 0.413}, None).endswith("dense MFU 41.3%")


def test_preparation_prints_few_lines_without_a_terminal():
    out = io.StringIO()
    console = Console(out)
    for done in range(0, 1001, 10):
        console.progress(state("tokenize", done, 1000))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "tokenize: 1.00k of 1.00k tokens  500 tokens/s"
    console.progress(state("write", 5, None))
    console.progress(state("read", 10_000_000, None, "bytes", tokens=2_000_000))
    write, read = out.getvalue().splitlines()[2:]
    assert write == "write: 5 tokens  2 tokens/s"
    assert read == "read: 10.0M bytes  5.00M bytes/s  1.00M tokens/s"
    console.progress(state("waiting for another process", 0, None, ""))
    assert out.getvalue().splitlines()[4] == "waiting for another process"


def test_closed_or_ascii_output_is_not_an_error():
    out = io.StringIO()
    out.close()
    console = Console(out)
    console.info("x")
    console.step(line(1), 10)
    console.table("t", [("a", "b")])
    raw = io.BytesIO()
    ascii = io.TextIOWrapper(raw, encoding="ascii")
    Console(ascii).info("[bold]β[/bold] " + "y" * 300)
    assert raw.getvalue() == b"[bold]?[/bold] " + b"y" * 300 + b"\n", "no markup, no wrapping"


def test_live_line_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(out, live=True)
    for step in (100, 200):
        console.step(line(step, flip_rate=0.01, tokens_per_second=12345.0), 700)
    console.step({"step": 200, "split": "validation", "loss": 2.0}, 700)
    console.stop()
    text = out.getvalue()
    assert "step 200/700" in text and "ETA 16:40" in text and "validation" in text
    assert "…" not in text
    console.stop()  # again: no effect


def test_own_warnings_are_printed_as_lines(recwarn):
    out = io.StringIO()
    for _ in range(2):  # once per use
        with own_warnings(Console(out).warn):
            warnings.warn("steps become longer", SparsePretrainWarning, stacklevel=1)
            warnings.warn("of another package", UserWarning, stacklevel=1)
    warnings.warn("afterwards", SparsePretrainWarning, stacklevel=1)
    assert out.getvalue() == "warning: steps become longer\n" * 2
    assert [str(w.message) for w in recwarn] == ["of another package"] * 2 + ["afterwards"]


@pytest.fixture
def terminal(monkeypatch):
    """``terminal(40)``: what is printed there is on a terminal of so many columns."""

    def make(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        return Terminal()

    return make


@pytest.mark.parametrize("shell", ["| head -1", ">&-"])
def test_broken_pipe_leaves_exit_code_and_stderr_alone(shell):
    code = (
        "from sparsepretrain.console import Console; c = Console();"
        "[c.info('x' * 1000) for _ in range(500)]; open('/dev/stderr', 'w').write('done')"
    )
    command = f'set -o pipefail; "{sys.executable}" -c "{code}" {shell}'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "done")


def test_terminal_lines_wrap_between_words(terminal):
    out = terminal(40)
    console = Console(out)
    console.info("runs/a: learning rate 1e-3, steps 0 to 40 of the whole run")
    console.warn("this machine has no CUDA device for the products")
    command = "sparsepretrain train sparsity=sste sparsity.gamma=0.2"
    console.info(command)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert "steps 0" in " ".join(lines) and max(map(len, lines[:4])) <= 40
    assert lines[-1] == command, "commands are not wrapped"


def test_table_folds_columns_on_a_narrow_terminal(terminal):
    out, name = terminal(40), "transformer.h.0.mlp.c_fc"
    row = [name, "a reason of many words, too long", "x" * 20]
    Console(out).table("", [row], ["layer", "why", "what"])
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    cells = ["".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)]
    assert name in cells[0] and "…" not in text
