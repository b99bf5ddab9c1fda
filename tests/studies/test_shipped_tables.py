"""The shipped tables: each cell is a run that could start, numbers and settings have a source."""

import pytest

from sparsepretrain.studies import tables
from sparsepretrain.studies.cells import Selection, cells, stage_words
from sparsepretrain.studies.tables import cell_name, load_table, printed, table_cells
from sparsepretrain.training.derive import check_finetuning
from sparsepretrain.training.plan import check

NAMES = list(tables.names())
SCALES = [(name, scale) for name in NAMES for scale in load_table(name).scales]


@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_a_table_and_every_setting_has_a_reason(name):
    table = load_table(name)
    assert set(table.parts) <= set(NAMES) - {name}
    assert table.parts or table.bench or table.settings or table.scales.keys() == {"nano"}
    assert [key for key, setting in table.settings.items() if not setting.where] == []
    sparse_claims = [c.text for c in table.claims if c.untestable.keys() - table.scales.keys()]
    assert sparse_claims == []


@pytest.mark.parametrize("name", NAMES)
def test_every_published_label_has_a_number_or_a_reason(name):
    for source in load_table(name).published:
        at = [(r, c) for r in source.rows for c in source.columns or [""]]
        found = {(r, c): printed(source, r, c) for r, c in at}
        for label in [*source.rows, *source.columns]:
            assert any(row for (r, c), row in found.items() if label in (r, c)), label
        for row in filter(None, found.values()):
            assert row["status"] and row["source"]
            assert row["value"] is not None or row["reason"]


def trained_cells(table, scale):
    """Rows and columns with runs of their own: not those of pruned or fine-tuned ones."""
    staged = table.scales[scale].staged
    found = table_cells(table, scale)
    return [(row, column) for row, column, why in found if not why and row not in staged]


@pytest.mark.parametrize("name", sorted({name for name, _ in SCALES}))
def test_the_last_cell_is_a_run(name):
    """One cell of each table; all of them in the slow tier."""
    table = load_table(name)
    scale = next(iter(table.scales))
    row, column = trained_cells(table, scale)[-1]
    only = "".join(f"[{c}]" if c in "*?[" else c for c in cell_name(row, column))
    (cell,) = cells(name, table, scale, Selection(1, only))
    assert cell.seed == table.first_seed
    assert cell.run.runs_dir == f"runs/{name}"


@pytest.mark.parametrize(
    ("name", "scale"), [(n, s) for n, s in SCALES if load_table(n).scales[s].tune is not None]
)
def test_the_last_setting_of_each_tuned_row_is_a_run(name, scale):
    """All settings of a row have the same keys; a study checks them before its first run."""
    table = load_table(name)
    tune = table.scales[scale].tune
    settings = {row: tune.settings(row)[-1] for row in table.rows}
    found = cells(name, table, scale, Selection(1), settings=settings)
    assert [cell.row for cell in found] == [*table.rows]
    assert set(tune.seeds).isdisjoint(range(table.first_seed, table.first_seed + 100))
    for cell in found:
        rates = [float(s.split("=")[1].split()[0]) for s in tune.settings(cell.row)]
        assert cell.run.optim.lr == max(rates)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_cell_is_a_run_that_could_start(name, scale):
    """Composed, validated, and built on the meta device, its fine-tunings composed too."""
    table = load_table(name)
    found = cells(name, table, scale, Selection(1))
    assert [cell.name for cell in found] == [cell_name(*at) for at in trained_cells(table, scale)]
    assert len({cell.run.name for cell in found}) == len(found)
    for cell in found:
        if cell.run.model.family != "pretrained":  # its shape is on the hub
            check(cell.run)
        for stage in table.scales[scale].stages:
            if stage.finetune is not None and cell is found[-1]:
                check_finetuning(cell.run, stage_words(cell, stage), ())
