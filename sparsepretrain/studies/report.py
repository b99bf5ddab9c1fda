"""Write the page of a table with its figures, from runs or from a record."""

from __future__ import annotations

from pathlib import Path

from sparsepretrain.errors import ConfigError, DataError
from sparsepretrain.reports.page import write_page
from sparsepretrain.studies.cells import Selection
from sparsepretrain.studies.results import collect, read_record, write_record
from sparsepretrain.studies.table_page import render
from sparsepretrain.studies.tables import Scale, load_table


def report_table(
    name: str,
    out: Path | None,
    scale: Scale | None,
    asked: Selection,
    *,
    record: bool,
    from_record: bool,
) -> list[Path]:
    """Write the page of a table as ``<name>.md`` and ``<name>.html``, and its ``<name>-*.png``.

    Args:
        name: name of the table.
        out: directory to write to; None: ``reports/<name>``.
        scale, asked: selection of runs, see :func:`results.collect`.
        record: also write ``records/<name>.json.gz``, from which the page can be rewritten.
        from_record: read that file instead of runs.
    """
    out = Path("reports", name) if out is None else out
    file = out / "records" / f"{name}.json.gz"
    if from_record:
        results = read_record(file)
    else:
        results = collect(name, scale, asked)
        parts = results.all()
        if not any(part.cells for part in parts) and any(part.scale for part in parts):
            raise ConfigError(
                f"no run of {name} matches: run `sparsepretrain reproduce {name}`, or give "
                "the --scale, --seeds and KEY=VALUE of that command"
            )
    names = [results.name, *(part.name for part in results.all())]
    tables = {table: load_table(table, asked.config_dirs) for table in names}
    for part in results.all():
        if part.scale is not None and part.scale not in tables[part.name].scales:
            raise DataError(f"{file} has runs at scale {part.scale!r}, which {part.name} has not")
    written = write_page(out, render(results, tables), f"{name}.md", page=True)
    if record:
        write_record(results, file)
    return written
