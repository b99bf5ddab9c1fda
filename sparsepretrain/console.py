"""Console output of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypeGuard

from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from sparsepretrain.data.preparation import Progress as Preparation

PLAIN_SECONDS = 10.0
"""Seconds between two lines of data preparation without a terminal."""


class Console:
    """Prints lines, progress and tables; safe to call from several threads.

    A closed output (``| head``, a lost terminal) silences the console and is never an error.
    ``live``: redraw a progress bar; None: if ``file`` is a terminal.
    """

    def __init__(self, file: TextIO | None = None, *, live: bool | None = None) -> None:
        sink: Any = _Sink(file or sys.stdout)
        width = None if sink.isatty() else 200  # files have no width
        self._rich = RichConsole(
            file=sink, force_terminal=live, width=width, highlight=False, markup=False, emoji=False
        )
        terminal = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self.live = terminal if live is None else live
        self._view: Live | None = None
        self._kind = ""
        self._first: tuple[int, float] | None = None
        self._printed = ("", 0.0)
        self._sparse: tuple[int, float] | None = None  # (step, sparse) of the last line
        self.unit = "tokens"
        """Unit that the task counts, in the plural."""

    @classmethod
    def silent(cls) -> Console:
        """Return a console that prints nothing."""
        return cls(open(os.devnull, "w"), live=False)

    def info(self, line: str) -> None:
        """Print a line; a terminal wraps lines between words, except commands."""
        self._rich.print(line, soft_wrap=self._is_soft(line))

    def warn(self, line: str) -> None:
        """Print a line that starts with ``warning:``."""
        self._rich.print(f"warning: {line}", soft_wrap=self._is_soft(line), style="yellow")

    def _is_soft(self, line: str) -> bool:
        """Return True if the line is not wrapped, so that a command is copied whole."""
        return not self._rich.is_terminal or line.startswith("sparsepretrain ")

    def loading(self, what: str) -> None:
        """Announce the import of transformers, which takes seconds."""
        if "transformers" not in sys.modules:
            self.info(f"{what}: loading the model")

    def table(
        self,
        title: str,
        rows: Sequence[Sequence[object]],
        header: Sequence[str] | None = None,
        *,
        lines: bool = True,
        redraw: bool = False,
    ) -> None:
        """Print a table, with borders if ``lines``; wide columns are folded, never cut off.

        ``redraw``: replace the previous table on a terminal; printed lines stay above.
        """
        texts = [list(map(str, row)) for row in rows]
        names = header or [""] * max(map(len, texts), default=0)
        columns = [Column(name, overflow="fold") for name in names]  # the widest shrinks first
        table = Table(*columns, title=title or None, title_justify="left", title_style="bold")
        table.show_header = header is not None
        if not lines:
            table.box = None
            table.padding = (0, 2, 0, 0)
        for row in texts:
            table.add_row(*row)
        if redraw:
            self._draw("table", table)
        else:
            self._rich.print(table)

    def progress(self, state: Preparation) -> None:
        """Show the progress and speed of data preparation."""
        done = state.done
        total = state.total
        unit = state.unit
        text = f"{count(done)} {unit}" if done or unit else ""
        if total is not None:
            text = f"{count(done)} of {count(total)} {unit}"
        if done and state.seconds > 0:
            text += f"  {count(done / state.seconds)} {unit}/s"
            if state.tokens and unit != "tokens":
                text += f"  {count(state.tokens / state.seconds)} tokens/s"
            if total is not None and done < total:
                text += f"  ETA {clock(state.seconds * (total - done) / done)}"
        finished = done == total
        phase, at = self._printed
        if self.live:
            self._draw_bar(state.phase, state.done, state.total, text)
            if finished:
                self.stop()
        elif phase != state.phase or finished or time.monotonic() - at >= PLAIN_SECONDS:
            self._printed = (state.phase, time.monotonic())
            self.info(f"{state.phase}: {text}" if text else state.phase)

    def counter(self, unit: str) -> Callable[[int, int, str], None]:
        """Return a function that shows the progress of a loop: (done, all, phase)."""
        begin: dict[str, float] = {}

        def report(done: int, total: int, phase: str) -> None:
            seconds = time.monotonic() - begin.setdefault(phase, time.monotonic())
            self.progress(Preparation(phase, done, total, unit, seconds))

        return report

    def step(self, line: dict[str, Any], total: int | None) -> None:
        """Show a line of the record: training on the live line, evaluations and switches above."""
        step = line["step"]
        label = f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"
        if "split" in line:
            hidden = ("step", "split", "time", "tokens")
            values = [
                f"{k} {significant(v)}" for k, v in line.items() if k not in hidden and _number(v)
            ]
            self.info("  ".join([label, line["split"], *values]))
            return
        left = self._seconds_left(line, total)
        text = describe(line, left, short=self.live, unit=self.unit)
        if "sparse" in line:
            before, self._sparse = self._sparse, (step, line["sparse"])
            if before is not None and before[0] < step and before[1] != line["sparse"]:
                self.info(f"{label}  {switch(line)}")
        if self.live:
            self._draw_bar(label, step, total, text)
        else:
            self.info(f"{label}  {text}")

    def stop(self) -> None:
        """Stop redrawing; later lines come below."""
        if self._view is not None:
            self._view.stop()
        self._view = self._first = None

    def _draw(self, kind: str, picture: Table) -> None:
        """Show ``picture``; it replaces the previous one of the same kind."""
        if self._view is None or self._kind != kind:
            if self._view is not None:
                self._view.stop()
            self._view, self._kind = Live(console=self._rich, refresh_per_second=4), kind
            self._view.start()
        self._view.update(picture)

    def _draw_bar(self, label: str, done: int, total: int | None, text: str) -> None:
        columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
        grid = Table.grid(*columns, padding=(0, 1), expand=True)
        grid.add_row(label, ProgressBar(total, done), text)
        self._draw(label.partition(" ")[0], grid)

    def _seconds_left(self, line: dict[str, Any], total: int | None) -> float | None:
        """Estimate from the speed since the first shown line, which excludes earlier processes."""
        if total is None or "time" not in line:
            return None
        self._first = self._first or (line["step"], line["time"])
        steps = line["step"] - self._first[0]
        seconds = line["time"] - self._first[1]
        return (total - line["step"]) * seconds / steps if steps else None


def describe(
    line: dict[str, Any], seconds_left: float | None, *, short: bool = False, unit: str = "tokens"
) -> str:
    """Return the numbers of a training line in fixed columns; ``short`` fits a terminal."""
    # the record holds null for a loss that is not finite
    loss, flips, rate = map(line.get, ("loss", "flip_rate", "tokens_per_second"))
    parts = ["loss    nan" if loss is None else f"loss {significant(loss)}"]
    parts.append("flip       –" if flips is None else f"flip {flips:.1e}")
    if _number(line.get("lr")) and not short:
        parts.append(f"lr {line['lr']:.2e}")
    if _number(line.get("grad_norm")) and not short:
        parts.append(f"grad {line['grad_norm']:.3g}".ljust(10))
    if _number(rate):
        parts.append(f"{count(rate):>5} {unit}/s")
    if _number(line.get("mfu_dense")):  # sparse matmuls counted as dense
        parts.append(f"dense MFU {100 * line['mfu_dense']:.1f}%")
    if seconds_left is not None:
        parts.append(f"ETA {clock(seconds_left)}")
    return "  ".join(parts)


def switch(line: dict[str, Any]) -> str:
    """Return the text for the first line of a dense or sparse phase."""
    text = "sparse from here on" if line.get("sparse") else "dense from here on"
    change = line.get("autoswitch_z")
    threshold = line.get("autoswitch_threshold")
    if _number(change) and _number(threshold):
        text += f" (AutoSwitch: Z̄ {change:.2e}, ε {threshold:.2e})"
    return text


def significant(value: float) -> str:
    """Return five significant digits: ``2.0767``, ``98.120``, ``0.020123``, ``1.2000e-06``."""
    return f"{value:#.5g}".removesuffix(".")


def count(number: float) -> str:
    """Return a count in at most five characters: ``950``, ``12.3k``, ``4.56M``."""
    for power, suffix in zip(range(21, 0, -3), "ZEPTGMk", strict=True):
        size = 10.0**power
        if number >= 0.9995 * size:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{suffix}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """Return a duration: ``0:42``, ``2:03:10``, ``3d 04:05:06``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Sink:
    """Text file that falls silent when the underlying file is closed."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = None if file is None or file.closed else file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()

    def write(self, text: str) -> int:
        encoded = text.encode(self.encoding, "replace").decode(self.encoding)
        self._do(lambda file: file.write(encoded))
        return len(text)

    def flush(self) -> None:
        self._do(lambda file: file.flush())

    def _do(self, action: Callable[[TextIO], object]) -> None:
        file = self._file
        if file is None:
            return
        try:
            action(file)
        except (OSError, ValueError):
            self._file = None
            # redirect the descriptor: flushing the buffer at exit would fail again
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, file.fileno())
                os.close(null)
