"""Runs of a tuned table as jobs that wait for its tuning runs, which choose their settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.studies import reproduce
from sparsepretrain.studies.cells import Part, Selection, cells
from sparsepretrain.studies.jobs import Job
from sparsepretrain.studies.matching import matched
from sparsepretrain.studies.progress import StudyCell
from sparsepretrain.studies.tables import Scale, load_table


@dataclass
class JudgedJob(Job):
    """Trains a cell of a tuned table with the setting that the tuning runs of its row chose."""

    scale: Scale
    asked: Selection

    def cell(self, console: Console) -> StudyCell:
        """Return the cell with the chosen setting.

        Raises:
            ConfigError: the tuning runs of the row are not finished.
        """
        found = reproduce.parts(self.part.name, self.scale, self.asked, self.stop_after)
        for part in [part for part in found if not part.is_tuning]:
            own = [c for c in part.cells if (c.row, c.column, c.seed) == self.place[:3]]
            if own:
                checked = reproduce.check([dataclasses.replace(part, cells=own)], console)
                (made,) = reproduce.to_run(checked, console)
                return made
        raise ConfigError(f"{self.label}: the tuning runs of the row are not finished")


def judged_jobs(
    name: str, scale: Scale | None, asked: Selection, stop_after: int | None
) -> dict[str, Job]:
    """Return name in the list of jobs -> job, of every run that follows the tuning of a table."""
    jobs: dict[str, Job] = {}
    for table_name in load_table(name, asked.config_dirs).parts or [name]:
        table = load_table(table_name, asked.config_dirs)
        at = scale or ("nano" if "nano" in table.scales else "paper")
        if table.bench or at not in table.scales or table.scales[at].tune is None:
            continue
        equal = matched(table_name, table, at, asked) if table.match else None
        part = Part(table_name, table, at, [], stop_after, asked.config_dirs)
        for cell in cells(table_name, table, at, asked, matched=equal):
            place = (cell.row, cell.column, cell.seed, cell.words)
            jobs[reproduce.job_key(part, cell)] = JudgedJob(
                cell.label, (), {}, stop_after, part, place, at, asked
            )
    return jobs
