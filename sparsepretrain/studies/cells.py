"""Runs of a table: one per row, column and seed, all checked before the first starts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from sparsepretrain.config.compose import quote, read
from sparsepretrain.config.schema import Run
from sparsepretrain.config.validate import load
from sparsepretrain.errors import ConfigError
from sparsepretrain.registry import suggestion
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.studies.tables import Scale, Stage, Table, Tune, cell_name, slug, table_cells

SIMPLE = re.compile(r"(?!(?:true|false|null|inf|nan)$)[a-z/][\w/.+-]*", re.ASCII | re.IGNORECASE)
"""Names that need no quotes in Hydra's grammar."""

MOST_SEEDS = 1000
"""Most seeds of a command; more is rather a seed that was given as their number."""
Seeds = Sequence[int] | int | None
"""Seeds of a table, their number, or None for the default of the table's scale."""


def read_seeds(text: str) -> Sequence[int] | int:
    """Read a number of seeds (``5``), a range (``101..105``) or a list (``3,7,11``)."""
    most = f"expected at most {MOST_SEEDS:,} seeds, got"
    if text.isdigit() and int(text):
        if int(text) > MOST_SEEDS:
            raise ValueError(f"{most} {text}: a single seed is {text}..{text}")
        return int(text)
    if limits := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = map(int, limits.groups())
        if high - low >= MOST_SEEDS:
            raise ValueError(f"{most} {text}")
        if low <= high:
            return range(low, high + 1)
    listed = text.split(",")
    if len(listed) > 1 and all(part.isdigit() for part in listed):
        return list(dict.fromkeys(map(int, listed)))
    raise ValueError(
        f"expected a number of seeds, FIRST..LAST or a list such as 3,7,11, got {text!r}"
    )


def seeds_text(seeds: Sequence[int] | int) -> str:
    """Return the inverse of :func:`read_seeds`."""
    if isinstance(seeds, int):
        return str(seeds)
    if len(seeds) > 1 and [*seeds] != [*range(seeds[0], seeds[-1] + 1)]:
        return ",".join(map(str, seeds))
    return f"{seeds[0]}..{seeds[-1]}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Run of a table."""

    row: str
    column: str
    """Empty if the table has no columns."""
    seed: int
    words: tuple[str, ...]
    """All overrides of ``sparsepretrain train``."""
    run: Run

    @property
    def name(self) -> str:
        """``row`` or ``row @ column``."""
        return cell_name(self.row, self.column)

    @property
    def label(self) -> str:
        """``row``, or ``row @ column``, and the seed."""
        return f"{self.name}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Part:
    """Selected runs of a table, or runs of a `train -m`."""

    name: str
    table: Table
    scale: Scale | None
    """None: a `train -m`, or a table that a script of ``benchmarks/`` measures."""
    cells: list[Cell]
    stop_after: int | None = None
    """Step after which every run ends early, or None."""
    config_dirs: Sequence[Path] = ()
    """See :func:`validate.load`."""
    is_tuning: bool = False
    """True: the cells choose the setting of each row; a diverged one is a result, the worst."""
    outdated: int = 0
    """Finished runs of a record at the place of one of the cells, with another configuration."""

    @property
    def stages(self) -> list[Stage]:
        """Stages that follow the training of each cell."""
        if self.scale is None or self.is_tuning:
            return []
        return self.table.scales[self.scale].stages


@dataclass(frozen=True, slots=True)
class Selection:
    """Runs of a table that a command asks for."""

    seeds: Seeds = None
    """The seeds, or their number from ``table.first_seed`` on; None: those of the scale."""
    only: str = "*"
    """Glob of rows or of ``row @ column``."""
    overrides: Sequence[str] = ()
    """Further overrides of all cells, with the highest precedence."""
    config_dirs: Sequence[Path] = ()
    """See :func:`validate.load`."""
    nodes: int = 1
    """Machines of a run."""
    records: Path | None = None
    """Directory of a table's record, whose finished runs need no directory of their own."""


def cells(
    name: str,
    table: Table,
    scale: Scale,
    asked: Selection,
    *,
    matched: Mapping[tuple[str, str], Sequence[str]] | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[Cell]:
    """Return the runs of a table, seed by seed: a stopped table has complete seeds.

    Run directories are ``<runs_dir>/<name>/<row>[--<column>]/<hash>-s<seed>``.

    Args:
        matched: (row, column) -> overrides that give it the cost of another row, see
            ``table.match``.
        settings: row -> tuned setting; rows without one are left out. None: nothing is tuned.
    """
    wanted = cell_overrides(name, table, scale, asked, matched)
    if settings is not None:
        wanted = {
            at: [*words, *settings[at[0]].split()]
            for at, words in wanted.items()
            if at[0] in settings
        }
    size = table.scales[scale]
    wished = size.seeds if asked.seeds is None else asked.seeds
    first = table.first_seed
    seeds = range(first, first + wished) if isinstance(wished, int) else wished
    if size.tune is not None and (both := sorted({*seeds} & {*size.tune.seeds})):
        raise ConfigError(
            f"seeds: expected seeds that tune no row of {name}, got {both}. "
            "Choose others with --seeds"
        )
    found = grid(name, wanted, seeds, asked.config_dirs, nodes=asked.nodes)
    if not isinstance(wished, int):
        return found
    ends = {at: first + size.most_seeds(*at, wished) for at in wanted}
    return [cell for cell in found if cell.seed < ends[cell.row, cell.column]]


def tuning_cells(
    name: str,
    table: Table,
    scale: Scale,
    tune: Tune,
    asked: Selection,
    matched: Mapping[tuple[str, str], Sequence[str]] | None,
) -> list[Cell]:
    """Return the runs that choose the setting of each row, which is the column of its cell."""
    wanted = cell_overrides(name, table, scale, asked, matched)
    tried = {
        (row, setting): [*words, *setting.split()]
        for (row, _), words in wanted.items()
        for setting in tune.settings(row)
    }
    keys = {word.partition("=")[0] for _, setting in tried for word in setting.split()}
    if tuned := [word for word in asked.overrides if word.lstrip("+").partition("=")[0] in keys]:
        raise ConfigError(f"{tuned[0]}: {name} tunes this key itself, leave it out")
    return grid(name, tried, tune.seeds, asked.config_dirs, nodes=asked.nodes, job_type="tune")


def cell_overrides(
    name: str,
    table: Table,
    scale: Scale,
    asked: Selection,
    matched: Mapping[tuple[str, str], Sequence[str]] | None = None,
) -> dict[tuple[str, str], list[str]]:
    """Return (row, column) -> overrides of the cells that match ``asked.only``."""
    if scale not in table.scales:
        has = ", ".join(table.scales) or "none: a script of benchmarks/ measures the table"
        raise ConfigError(f"table {name} has no scale {scale!r}; its scales: {has}")
    size = table.scales[scale]
    # with `seed=` in the overrides, all seeds of a cell would be one run
    if any(word.partition("=")[0].lstrip("+") in ("seed", "name") for word in asked.overrides):
        raise ConfigError("a table sets seed and name itself: use --seeds, leave name out")
    kinds = [word.partition("=")[2] for word in asked.overrides if word.startswith("match=")]
    rows = _compared(name, table, kinds[-1]) if kinds else [*table.rows]
    overrides = [word for word in asked.overrides if not word.startswith("match=")]
    rows = [row for row in rows if row not in size.staged]
    known = [(r, column) for r, column, why in table_cells(table, scale) if not why and r in rows]
    experiment = [] if table.experiment is None else [f"experiment={table.experiment}"]
    wanted = {
        (r, c): [
            *experiment,
            *[*size.overrides, *table.columns.get(c, ()), *size.columns.get(c, ())],
            *[*table.rows[r], *size.rows.get(r, ()), *overrides],
            *(matched or {}).get((r, c), ()),
        ]
        for r, c in known
        if fnmatchcase(r, asked.only) or fnmatchcase(cell_name(r, c), asked.only)
    }
    if not wanted:
        near = suggestion(asked.only, [cell_name(*at) for at in known])
        raise ConfigError(f"--only: no row or cell of {name} is {asked.only!r}{near}")
    return wanted


def _compared(name: str, table: Table, kind: str) -> list[str]:
    """Return the rows that ``match=KIND`` keeps: those of this kind, theirs, and the baseline."""
    row_names = [row for row, match in table.match.items() if match.equal == kind]
    if not row_names:
        known = ", ".join(dict.fromkeys(match.equal for match in table.match.values()))
        if not known:
            raise ConfigError(f"match: table {name} has no matched rows; leave it out")
        raise ConfigError(f"match: expected a kind of table {name} ({known}), got {kind!r}")
    others = [table.match[row].to for row in row_names]
    return [*row_names, *others, *filter(None, [table.baseline])]


def grid(
    name: str,
    wanted: Mapping[tuple[str, str], Sequence[str]],
    seeds: Sequence[int],
    config_dirs: Sequence[Path] = (),
    *,
    nodes: int = 1,
    job_type: str = "",
) -> list[Cell]:
    """Return the runs of every (row, column) -> overrides with every seed, see :func:`cells`.

    The seeds of a cell are one group of the tracker, unless the overrides give another.
    """
    cells: list[Cell] = []
    errors: dict[str, list[str]] = {}
    for (row, column), overrides in wanted.items():
        try:
            base = dict(read(overrides, config_dirs).values).get("runs_dir", "runs")
            cell_directory = "--".join(slug(part) for part in (row, column) if part)
            shared = [w for w in overrides if w.lstrip("+").partition("=")[0] != "runs_dir"]
            words = [*shared, word("runs_dir", f"{base}/{name}"), word("name", cell_directory)]
            own = {"group": f"{name}/{cell_directory}"[:128], "job_type": job_type}
            asked = {w.lstrip("+").partition("=")[0] for w in overrides}
            words += [
                word(f"tracker.{key}", text)
                for key, text in own.items()
                if text and f"tracker.{key}" not in asked
            ]
            run = load(words, config_dirs, nodes=nodes)
        except ConfigError as error:
            for message in error.messages:
                errors.setdefault(message, []).append(cell_name(row, column))
            continue
        cells += [
            Cell(row, column, seed, (*words, f"seed={seed}"), dataclasses.replace(run, seed=seed))
            for seed in seeds
        ]
    if errors:
        raise ConfigError([f"{', '.join(where)}: {what}" for what, where in errors.items()])
    return sorted(cells, key=lambda cell: cell.seed)  # stable: table order within a seed


def pruning_words(stage: Stage, run: str) -> list[str]:
    """Return the words of ``prune`` after ``run``, the directory of the run."""
    flags = {"method": stage.prune, "pattern": stage.pattern}
    flags["out"] = str(Path(run, RunDirectory.pruned.name, stage.name))
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    options = [f"{key}={json.dumps(value)}" for key, value in stage.options.items()]
    return [*words, *options, *stage.overrides]


def stage_words(cell: Cell, stage: Stage) -> list[str]:
    """Return the words of ``finetune``, ``eval`` or ``prune`` after the directory of the run.

    Tracker, workers and processes are those of the cell, hyperparameters are not.
    """
    if stage.prune is not None:
        return pruning_words(stage, str(RunDirectory.of(cell.run).path))
    if stage.finetune is None:
        average = [f"average={stage.average}"] if stage.average > 1 else []
        return [f"split={stage.evaluate}", *average, *stage.overrides]
    shared = [w for w in cell.words if re.match(r"\+*(tracker|workers|parallel)\b", w)]
    name = word("name", f"{cell.run.name}--{stage.name}")
    where = [word("runs_dir", cell.run.runs_dir), name, f"seed={cell.seed}"]
    return [f"task={stage.finetune}", *shared, *stage.overrides, *where]


def word(key: str, value: str) -> str:
    """Return ``key=value`` as typed, quoted if necessary."""
    return f"{key}={value if SIMPLE.fullmatch(value) else quote(value)}"
