import io
import re
import subprocess
import sys
import warnings

import pytest

from sparsepretrain.data.preparation import Progress
from sparsepretrain.errors import SparsePretrainWarning
from sparsepretrain.tracking.console import Console, clock, count, describe, significant


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def state(phase: str, done: int, total: int | None, unit: str = "tokens", **more: int) -> Progress:
    return Progress(phase=phase, done=done, total=total, unit=unit, seconds=2.0, **more)


def line(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "time": 2.0 * step, "loss": 1.5, "lr": 1e-3, **values}


def test_plain_lines_align_and_tell_the_time_left():
    out = io.StringIO()
    console = Console(out)
    console.step(line(9, tokens_per_second=900.0), 100)
    console.step(line(10, flip_rate=0.0123, tokens_per_second=12345.0), 100)
    first, second = out.getvalue().splitlines()
    assert first.startswith("step   9/100  loss 1.5000  flip       –")
    assert second == (
        "step  10/100  loss 1.5000  flip 1.2e-02  lr 1.00e-03  12.3k tokens/s  ETA 3:00"
    )
    assert first.index("tokens/s") == second.index("tokens/s")


def test_eta_after_a_resume_uses_new_steps():
    out = io.StringIO()
    console = Console(out)
    console.step({"step": 500, "time": 7.0, "loss": 1.0}, 1000)
    console.step({"step": 510, "time": 17.0, "loss": 1.0}, 1000)
    assert "ETA" not in out.getvalue().splitlines()[0]
    assert out.getvalue().splitlines()[1].endswith("ETA 8:10")  # 1 s per step, 490 steps


def test_phase_switch_has_its_own_line():
    out = io.StringIO()
    console = Console(out)
    watched = {"autoswitch_z": 9.9e-9, "autoswitch_threshold": 1e-8}
    for step, values in enumerate(
        [{"sparse": 0.0}, {}, {"sparse": 0.0}, {"sparse": 1.0, **watched}, {}, {"sparse": 0.0}], 1
    ):
        console.step(line(step, **values), 9)
    console.step({"step": 6, "split": "validation", "loss": 2.0}, 9)
    said = [text for text in out.getvalue().splitlines() if "from here on" in text]
    assert said == [
        "step 4/9  sparse from here on (AutoSwitch: Z̄ 9.90e-09, ε 1.00e-08)",
        "step 6/9  dense from here on",
    ]


def test_evaluations_and_missing_losses():
    out = io.StringIO()
    Console(out).step({"step": 5, "split": "validation", "time": 1.0, "loss": 2.0, "bleu": 27.1}, 9)
    assert out.getvalue() == "step 5/9  validation  loss 2.0000  bleu 27.100\n"
    assert describe({"loss": None}, None).startswith("loss    nan")
    assert describe({"loss": 1.0, "mfu_dense": 0.413}, None).endswith("dense MFU 41.3%")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0766688, "2.0767"),
        (0.0201234, "0.020123"),
        (98.12, "98.120"),
        (50257.4, "50257"),
        (1.2e-6, "1.2000e-06"),
        (0.0, "0.0000"),
    ],
)
def test_numbers_have_five_significant_digits(value, text):
    assert significant(value) == text


def test_markup_is_printed_as_typed_and_never_wrapped():
    out = io.StringIO()
    Console(out).info("[bold]x[/bold] :smile: " + "y" * 300)
    assert out.getvalue() == "[bold]x[/bold] :smile: " + "y" * 300 + "\n"


def test_preparation_prints_few_lines_off_a_terminal():
    out = io.StringIO()
    console = Console(out)
    for done in range(0, 1001, 10):
        console.progress(state("tokenize", done, 1000))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1] == "tokenize: 1.00k of 1.00k tokens  500 tokens/s"
    console.progress(state("write", 5, None))
    console.progress(state("read", 10_000_000, None, "bytes", tokens=2_000_000))
    assert out.getvalue().splitlines()[2:] == [
        "write: 5 tokens  2 tokens/s",
        "read: 10.0M bytes  5.00M bytes/s  1.00M tokens/s",
    ]

    console.progress(state("waiting for another process", 0, None, ""))
    assert out.getvalue().splitlines()[4] == "waiting for another process"


def test_live_line_fits_80_columns_and_evaluations_stay(monkeypatch):
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
    console.stop()  # again: harmless


def test_table_prints_header_and_rows():
    out = io.StringIO()
    Console(out).table("Summary", [("loss", 1.25), ("masks", "2:4")], header=("what", "value"))
    assert all(word in out.getvalue() for word in ("Summary", "what", "loss", "1.25", "2:4"))


def test_closed_output_is_no_error():
    out = io.StringIO()
    out.close()
    console = Console(out)
    console.info("x")
    console.step(line(1), 10)
    console.table("t", [("a", "b")])


def test_own_warnings_are_lines_and_others_stay(recwarn):
    out = io.StringIO()
    for _ in range(2):  # once per use, not once per process
        with Console(out).own_warnings():
            warnings.warn("steps become longer", SparsePretrainWarning, stacklevel=1)
            warnings.warn("of another package", UserWarning, stacklevel=1)
    warnings.warn("afterwards", SparsePretrainWarning, stacklevel=1)
    assert out.getvalue() == "warning: steps become longer\n" * 2
    assert [str(w.message) for w in recwarn] == ["of another package"] * 2 + ["afterwards"]


@pytest.mark.parametrize("shell", ["| head -1", ">&-"])
def test_broken_pipe_leaves_exit_code_and_stderr_alone(shell):
    code = (
        "from sparsepretrain.tracking.console import Console; c = Console();"
        "[c.info('x' * 1000) for _ in range(500)]; open('/dev/stderr', 'w').write('done')"
    )
    command = f'set -o pipefail; "{sys.executable}" -c "{code}" {shell}'
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "done")


def test_unencodable_characters_are_replaced():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(out)
    console.info("β = 1")
    console.info("still here")
    assert raw.getvalue() == b"? = 1\nstill here\n"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.6, "1.00k"), (1e3, "1.00k"), (12345, "12.3k"), (99960, "100k"),
     (999_960, "1.00M"), (124e6, "124M"), (3e9, "3.00G")],
)  # fmt: skip
def test_count_is_short(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (9e4, "1d 01:00:00")]
)
def test_clock_is_short(seconds, text):
    assert clock(seconds) == text


def test_throughput_has_the_unit_of_the_task():
    out = io.StringIO()
    console = Console(out)
    console.unit = "images"
    console.step({"step": 1, "loss": 1.0, "tokens_per_second": 100.0}, 2)
    assert "100 images/s" in out.getvalue() and "tokens" not in out.getvalue()


def test_a_terminal_gets_lines_broken_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console(out)
    console.info("runs/a: learning rate 1e-3, steps 0 to 40 of the whole run")
    console.warn("this machine has no CUDA device for the products")
    command = "sparsepretrain train sparsity=sste sparsity.gamma=0.2"
    console.info(command)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert "steps 0" in " ".join(lines) and max(map(len, lines[:4])) <= 40
    assert lines[-1] == command, "a command is copied whole"


def test_no_column_is_cut_off_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    name = "transformer.h.0.mlp.c_fc"
    Console(out).table(
        "", [[name, "a reason of many words, too long", "x" * 20]], ["layer", "why", "what"]
    )
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    cells = ["".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)]
    assert name in cells[0] and "…" not in text
