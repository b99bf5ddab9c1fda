"""Page of a table: published and measured numbers, verdicts, checks and figures.

A page is a pure function of table file, published numbers and results, without clock and local
paths: a committed record gives the same bytes again.
"""

from __future__ import annotations

import math
import statistics
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sparsepretrain.config.compose import shell_line
from sparsepretrain.console import clock, count
from sparsepretrain.reports.differences import ALPHA, SEEDS, Difference
from sparsepretrain.reports.page import Page, markdown_table
from sparsepretrain.studies import claims, figures, scaling, sizes, tables
from sparsepretrain.studies.cells import seeds_text
from sparsepretrain.studies.claims import Ruling, Verdict, judge
from sparsepretrain.studies.ran import what_ran
from sparsepretrain.studies.results import SHARED, CellResult, TableResults, chosen, means
from sparsepretrain.studies.tables import (
    Metric,
    Published,
    Table,
    cell_name,
    printed,
    published,
    table_cells,
)

FEW_CLAIMS = 5
"""Most claims of a page without a correction for multiple tests."""
HOLM = (
    "Holm: p of the verdict after Holm's correction for all claims of this {scope}; (not "
    f"significant): the corrected p is not below {ALPHA:g}."
)
COSTS = (
    "2:4 matmuls per layer: of three (forward, input gradient, weight gradient), mean over the "
    "run. FLOPs: of the whole run relative to {baseline}, if a 2:4 matmul costs half a dense one."
)
FIRST_HAND = ("published_text", "thesis_text", "authors_repo")
"""Statuses of published numbers without a warning."""


def render(results: TableResults, definitions: Mapping[str, Table]) -> Page:
    """Return the page of a table."""
    results, table = scaled(results, definitions[results.name])
    page = Page([f"# {table.title}", ""])
    if not results.parts:
        _section(page, results, table, "##")
        return page
    page.lines += [f"{note}\n" for note in table.notes]
    rulings = [pair for part in results.all() for pair in judged(part, definitions[part.name])]
    rows = [(claim.text, f"**{ruling.verdict}**") for claim, ruling in rulings]
    header, shown = _with_holm(("claim", "verdict"), rows, [ruling for _, ruling in rulings])
    explained = ["", HOLM.format(scope="page")] if len(header) > 2 else []
    page.lines += [*answer(rulings), *markdown_table(header, shown), *explained]
    for part in results.all():
        part, own = scaled(part, definitions[part.name])
        page.lines += ["", f"## {own.title}", ""]
        _section(page, part, own, "###")
    return page


def scaled(results: TableResults, table: Table) -> tuple[TableResults, Table]:
    """Return both as the page shows them, see :func:`tables.at_scale`."""
    if results.scale is None:
        return results, table
    labels = table.scales[results.scale].labels
    return results.renamed(labels), tables.at_scale(table, results.scale)


def judged(results: TableResults, table: Table) -> list[tuple[tables.Claim, Ruling]]:
    """Return claims and rulings of a table with runs of its own."""
    rulings = []
    results, table = scaled(results, table)
    for claim in table.claims:
        key = claim.metric or next(iter(table.metrics))
        if results.scale is not None:
            values = results.compared(key, table)
            gaps = results.gaps(key)
            rulings.append((claim, judge(claim, table, results.scale, values, gaps)))
    return rulings


def answer(rulings: Sequence[tuple[tables.Claim, Ruling]]) -> list[str]:
    """Return the verdicts in one paragraph, by the words of the claims if there are few."""
    if not rulings:
        return []
    if len(rulings) > FEW_CLAIMS:
        return [f"Of {len(rulings)} claims: {counted([[r for _, r in rulings]])}.", ""]
    by_verdict: dict[str, list[str]] = {}
    for claim, ruling in rulings:
        by_verdict.setdefault(ruling.verdict, []).append(claim.text)
    words = [
        f"{_capital(verdict)}: {'; '.join(by_verdict[verdict])}."
        for verdict in typing.get_args(Verdict)
        if verdict in by_verdict
    ]
    return [" ".join(words), ""]


def counted(by_table: Sequence[Sequence[Ruling]]) -> str:
    """Return the number of each verdict, and how many stay after Holm's correction.

    Args:
        by_table: rulings of each table, within which the correction is made.
    """
    numbers: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for rulings in by_table:
        numbers.update(ruling.verdict for ruling in rulings)
        corrected = zip(rulings, claims.holm(rulings), strict=True)
        kept.update(ruling.verdict for ruling, p in corrected if p < ALPHA)
    words = []
    for verdict in typing.get_args(Verdict):
        decided = verdict in ("held", "contradicted")
        if decided and kept[verdict] < numbers[verdict]:
            words.append(f"{numbers[verdict]} {verdict} ({kept[verdict]} after Holm's correction)")
        elif numbers[verdict]:
            words.append(f"{numbers[verdict]} {verdict}")
    return ", ".join(words)


def _section(page: Page, results: TableResults, table: Table, mark: str) -> None:
    scale = results.scale
    if mark == "##":
        page.lines += answer(judged(results, table) if scale is not None else [])
    page.lines += [*_head(results, table), ""]
    if scale is None:
        page.lines += [
            "Measured by scripts of a checkout, on a GPU:",
            *("", "```sh", *table.bench, "```", ""),
        ]
        if table.published:
            page.lines += [f"{mark} Published", "", *_only_published(table), ""]
    else:
        _measured(page, results, table, mark)
    if notes := [*table.notes, *(p.note for p in table.published if p.note)]:
        page.lines += [f"{mark} Limits", "", *(f"- {note}" for note in notes), ""]
    if scale is not None:
        _ran(page, results, table, mark)


def _measured(page: Page, results: TableResults, table: Table, mark: str) -> None:
    """Add numbers, verdicts and figures."""
    for key, metric in table.metrics.items():
        page.lines += [f"{mark} {_capital(metric.label)}", "", *_numbers(results, table, key), ""]
    rulings = judged(results, table)
    testable = [r for _, r in rulings if r.verdict != "not testable at this scale"]
    if testable and not any(d.n for ruling in testable for d in ruling.differences):
        page.lines += ["No claim can be judged yet: no seed has finished the runs of one.", ""]
    elif rulings:
        page.lines += [f"{mark} Verdicts", "", *_verdicts(rulings, table), ""]
    for name, (figure, caption) in figures.of_table(results, table).items():
        page.figures[f"{results.name}-{name}.png"] = figure
        page.lines += [f"![{caption}]({results.name}-{name}.png)", ""]
    if table.scaling and table.columns:
        page.lines += [
            f"{mark} Gap to {table.baseline} by size",
            "",
            *sizes.section(results, table),
        ]
    if table.scaling:
        page.lines += [f"{mark} Scaling law", "", *scaling.section(results, table), ""]


def _ran(page: Page, results: TableResults, table: Table, mark: str) -> None:
    """Add settings, tuning, pairing and the runs."""
    if ran := what_ran(results):
        page.lines += [f"{mark} What ran", "", *markdown_table(("setting", "value"), ran), ""]
    if results.tuning:
        page.lines += [f"{mark} Tuning", "", *_tuned(results, table), ""]
    page.lines += [f"{mark} Pairing", "", *_pairing(results, table), ""]
    if table.settings:
        at_paper = results.scale == "paper"
        title = "Settings of the paper" if at_paper else "Reasons for the settings"
        page.lines += [f"{mark} {title}", "", *_settings(table, values=at_paper), ""]
    page.lines += [f"{mark} Runs", "", *_runs(results), ""]


def _head(results: TableResults, table: Table) -> list[str]:
    paper = " ".join(filter(None, (table.paper, table.number)))
    if table.arxiv:
        paper += f" ([arXiv:{table.arxiv}](https://arxiv.org/abs/{table.arxiv}))"
    stands_in = "Stand-in for " if results.scale == "nano" else ""
    lines = [f"{stands_in}{paper}.", ""] if paper else []
    if stands_in and paper:
        lines += [
            "These runs have another model, other data and other lengths than the paper's: its "
            "numbers are not printed here. Published numbers that were found are in "
            "`sparsepretrain/studies/published.yaml`.",
            "",
        ]
    if results.scale is None:
        return lines
    states = Counter(cell.state for cell in results.cells)
    done = f"{states.pop('finished', 0)} of {len(results.cells)} runs are finished"
    states_text = [f"{number} {state}" for state, number in sorted(states.items())]
    seeds = ", ".join(map(str, results.seeds)) or "none"
    dates = sorted({cell.date for cell in results.cells if cell.date})
    when = f", of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    command = f"sparsepretrain reproduce {results.name} --scale {results.scale}"
    sizes = table.scales[results.scale]
    number = len(results.seeds)
    if results.seeds and results.seeds == [*range(table.first_seed, table.first_seed + number)]:
        # as a number: cells with fewer seeds keep theirs
        command += f" --seeds {number}" if number != sizes.seeds else ""
    elif results.seeds:
        command += f" --seeds {seeds_text(results.seeds)}"
    command = " ".join([command, *([shell_line(results.overrides)] if results.overrides else [])])
    cells = ", ".join([done, *states_text])
    return [*lines, f"{cells}{when}; scale {results.scale}, seeds {seeds}: `{command}`."]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _verdicts(rulings: Sequence[tuple[tables.Claim, Ruling]], table: Table) -> list[str]:
    cells = []
    for claim, ruling in rulings:
        text = f"{claim.text} ({claim.source})" if claim.source else claim.text
        cells.append((text, f"**{ruling.verdict}**", ruling.why))
    header, rows = _with_holm(("claim", "verdict", "why"), cells, [r for _, r in rulings])
    bar = (
        f"A verdict needs p < {ALPHA:g} and {SEEDS} seeds, by the test of its kind "
        "(docs/claims.md); in brackets 95 % intervals."
    )
    bar += f" {HOLM.format(scope='table')}" if len(header) > 3 else ""
    for metric in table.metrics.values():
        if metric.percent_of:
            bar += (
                f" Differences of the {metric.label} are in percent of {metric.percent_of} with "
                "the same seed. For an order, only the weakest pair is shown."
            )
    return [*markdown_table(header, rows), "", bar]


def _with_holm(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], rulings: Sequence[Ruling]
) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]]]:
    """Add Holm-adjusted p to rows of more than five claims."""
    if len(rulings) <= FEW_CLAIMS:
        return header, rows
    decided = [ruling.verdict in ("held", "contradicted") for ruling in rulings]
    marks = [
        f"{p:.1g}{'' if p < ALPHA else ' (not significant)'}" if is_decided else "–"
        for p, is_decided in zip(claims.holm(rulings), decided, strict=True)
    ]
    return (*header, "Holm"), [(*row, mark) for row, mark in zip(rows, marks, strict=True)]


def _numbers(results: TableResults, table: Table, key: str) -> list[str]:
    """Return a row per cell: published, measured, minus the baseline."""
    metric = table.metrics[key]
    scale = results.scale
    assert scale is not None
    values = results.values(key)
    digits = metric.digits
    compared = results.compared(key, table)
    sources = [source for source in table.published if source.metric == key]
    gaps = results.gaps(key)
    if "all" in gaps and not sources:
        return [f"Not measured: {gaps['all']}."]
    baseline = table.baseline
    header = [table.row_label, *([table.column_label or "column"] if table.columns else [])]
    if sources:
        header.append("published")
    header += ["measured", "n"]
    reference = metric.percent_of or baseline
    if reference:
        header.append(f"% above {reference}" if metric.percent_of else f"minus {reference}")
    costs = results.costs(baseline) if key == next(iter(table.metrics)) else {}
    if costs:
        header += ["2:4 matmuls per layer", "FLOPs, %"]
    rows = []
    empty = False
    unwanted: dict[str, list[str]] = {}
    for row, column, why in table_cells(table, scale):
        at = cell_name(row, column)
        mean = claims.difference(values, row, column, None)
        texts = [_published(s, metric, row, column, mean, scale) for s in sources]
        if why and not mean.n and not any(texts):
            unwanted.setdefault(why, []).append(at)
            continue
        empty |= bool(texts) and not any(texts)
        total = sum(cell.name == at for cell in results.cells)
        line = [row, *([column] if table.columns else [])]
        line += ["; ".join(filter(None, texts)) or "–"] if sources else []
        line += [_mean(mean, digits) if mean.n else f"not run: {why}" if why else "–"]
        line += [f"{mean.n} of {total}" if total else "0"]
        if reference:
            difference = claims.difference(compared, row, column, baseline)
            text = _mean(difference, 1 if metric.percent_of else digits, "+")
            line.append("–" if reference in (row, at) else text)
        if costs:
            matmuls, flops = costs.get(at, (math.nan, math.nan))
            line += ["–", "–"] if math.isnan(flops) else [f"{matmuls:.2g}", f"{flops:.0f}"]
        rows.append(line)
    about = [f"{metric.variant}." if metric.variant else ""]
    length = metric.sequence_length if scale == "paper" else None
    about += [f"Sequence length {length}." if length else ""]
    about += [f"{_capital(metric.better)} is better." if metric.better else ""]
    about += ["Means with 95 % intervals over seeds; differences are paired."]
    lines = [" ".join(filter(None, about)), "", *markdown_table(header, rows)]
    if costs:
        lines += ["", COSTS.format(baseline=baseline)]
    if sources:
        lines += ["", *_sources(sources, empty=empty)]
    if gaps:
        lines += ["", "Without a number: " + "; ".join(f"{at}: {w}" for at, w in gaps.items())]
    if unwanted:
        lines += ["", "Not run:", ""]
        lines += [f"- {'; '.join(cells)}: {why}." for why, cells in unwanted.items()]
    return lines


def _tuned(results: TableResults, table: Table) -> list[str]:
    """Return a row per tuned row: chosen setting, means of all settings, values at an end."""
    metric = next(iter(table.metrics.values()))
    rows = []
    for row, by_setting in means(results.tuning, table).items():
        values: dict[str, list[str]] = {}
        for word in " ".join(by_setting).split():
            key, _, value = word.partition("=")
            if value not in values.setdefault(key, []):
                values[key].append(value)
        setting = chosen(results.tuning, table).get(row, "")
        ends = [
            f"`{word}`"
            for word in setting.split()
            for tried in [values[word.partition("=")[0]]]
            if len(tried) > 1 and _is_number(tried[0])
            if word.partition("=")[2] in (tried[0], tried[-1])
        ]
        best, *rest = sorted(by_setting.values(), reverse=metric.better == "higher")
        rows.append(
            (
                row,
                " ".join(f"`{word}`" for word in setting.split()),
                ", ".join(ends) or "–",
                f"{best:.{metric.digits}f}",
                ", ".join(f"{value:.{metric.digits}f}" for value in rest),
            )
        )
    assert results.scale is not None
    tune = table.scales[results.scale].tune
    assert tune is not None
    several = len(tune.seeds) > 1
    seeds = f"the {'seeds' if several else 'seed'} {', '.join(map(str, tune.seeds))}"
    chosen_by = f"mean of the {metric.label}" if several else metric.label
    number = len(tune.settings(next(iter(table.rows))))
    text = (
        f"{number} settings per row, each run with {seeds}; the best {chosen_by} chose. The "
        "verdicts use other seeds. At an end: chosen values that are the smallest or largest "
        "tried; a wider grid may be better."
    )
    numbers = ("mean", "means of the others") if several else ("value", "values of the others")
    return [text, "", *markdown_table(("row", "chosen", "at an end", *numbers), rows)]


def _published(
    source: Published, metric: Metric, row: str, column: str, measured: Difference, scale: str
) -> str:
    entry = printed(source, row, column)
    if entry is None:
        return ""
    value = entry["value"]
    text = _value(entry)
    if scale == "paper" and measured.n and isinstance(value, int | float):
        text += f" (measured {measured.mean - value:+.{metric.digits}f}"
        if source.margin is not None:
            inside = "within" if abs(measured.mean - value) <= source.margin else "outside"
            text += f", {inside} ± {source.margin:g}"
        text += ")"
    return text


def _only_published(table: Table) -> list[str]:
    """Return the published numbers of a table without runs."""
    rows = [
        (cell_name(row, column), source.metric, _value(entry))
        for source in table.published
        for row in source.rows
        for column in source.columns or [""]
        if (entry := printed(source, row, column)) is not None
    ]
    lines = markdown_table((table.row_label, "number", "published"), rows)
    return [*lines, "", *_sources(table.published, empty=False)]


def _value(entry: Mapping[str, Any]) -> str:
    """Return a published number, marked if second-hand."""
    value = entry["value"]
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return text if entry["status"] in FIRST_HAND else f"{text} ⚠"


def _sources(sources: Sequence[Published], *, empty: bool) -> list[str]:
    lines = []
    for source in sources:
        entry = published()[source.paper, source.table]
        text = f"- Published: {source.paper}, {source.table}: {entry.get('source', '')}"
        if entry["status"] not in FIRST_HAND:
            text += f"; ⚠ {entry['status'].replace('_', ' ')}"
        text += f"; differences below {source.margin:g} are insignificant" if source.margin else ""
        lines.append(f"{text}. {entry.get('note') or ''}".rstrip())
    if empty:
        lines.append("- An empty cell was not found in any readable source.")
    return lines


def _mean(d: Difference, digits: int, sign: str = "") -> str:
    if not d.n:
        return "–"
    low, high = d.interval()
    half = (high - low) / 2
    scale = abs(d.mean) if math.isnan(half) else half
    lost = any(value and not float(f"{value:.{digits}f}") for value in (d.mean, half))
    if lost and scale:
        digits = 1 - math.floor(math.log10(scale))  # two significant digits
    text = "" if math.isnan(low) else f" ± {half:.{digits}f}"
    return f"{d.mean:{sign}.{digits}f}{text}"


def _pairing(results: TableResults, table: Table) -> list[str]:
    """Check that runs of a seed share initial weights, data order and evaluation, and hardware."""
    lines = []
    equal = []
    for name in SHARED:
        groups: dict[tuple[int, str], dict[str, list[str]]] = {}
        unknown = 0
        for cell in results.cells:
            if mark := cell.hashes.get(name):
                places = groups.setdefault((cell.seed, cell.settings.get(name, "")), {})
                places.setdefault(mark, []).append(cell.name)
            elif cell.state != "missing":
                unknown += 1
        label = _capital(name.replace("_", " "))
        unequal = [
            f"seed {seed}: {' ≠ '.join(', '.join(places) for places in marks.values())}"
            for (seed, _), marks in groups.items()
            if len(marks) > 1
        ]
        if unequal:
            lines.append(f"- {label}: **not equal**, so not paired: {'; '.join(unequal)}.")
        elif groups:
            equal.append(name.replace("_", " "))
        if unknown:
            lines.append(f"- {label}: not recorded by {unknown} runs.")
    if equal:
        lines.insert(0, f"- Equal within each seed and setting: {', '.join(equal)}.")
    return [*lines, *_hardware(results, table)] or ["Nothing was run."]


def _hardware(results: TableResults, table: Table) -> list[str]:
    """Return a line with the runs of a seed that had other hardware than what they compare with."""
    # percentages compare a run with one of its own column, and only they are compared further
    within = all(metric.percent_of for metric in table.metrics.values())
    machines: dict[tuple[str, int], dict[str, list[str]]] = {}
    for cell in results.cells:
        if cell.hardware:
            ran = machines.setdefault((cell.column if within else "", cell.seed), {})
            ran.setdefault(cell.hardware, []).append(cell.name)
    differing = [
        f"seed {seed}: {_by_machine(ran)}" for (_, seed), ran in machines.items() if len(ran) > 1
    ]
    if not differing:
        return []
    return [f"- Hardware differs, and rounding with it: {'; '.join(differing)}."]


def _by_machine(machines: Mapping[str, Sequence[str]]) -> str:
    """Return cells with their machine; most of what is compared has the last one."""
    *few, most = sorted(machines, key=lambda machine: len(machines[machine]))
    named = [f"{', '.join(machines[machine])} on {machine}" for machine in few]
    return " ≠ ".join([*named, f"what they are compared with on {most}"])


def _settings(table: Table, *, values: bool) -> list[str]:
    """Return the reason for each setting; runs at another scale may have other values."""
    lines = []
    for key, setting in table.settings.items():
        name = f"`{key}` {setting.value}" if values else f"`{key}`"
        reason = setting.source.replace("_", " ")
        if setting.where:
            reason = f"{setting.where}; {reason}"
        lines.append(f"- {name}: {reason}.")
    return lines


def _runs(results: TableResults) -> list[str]:
    """Return cost, hardware, commit and command of each cell."""
    by_place: dict[str, list[CellResult]] = {}
    for cell in results.cells:
        by_place.setdefault(cell.name, []).append(cell)
    rows = []
    commands = []
    for at, cells in by_place.items():
        states = Counter(cell.state for cell in cells)
        ran = [cell for cell in cells if cell.state != "missing"]
        done = [cell for cell in ran if cell.state == "finished"] or ran
        rows.append(
            (
                at,
                ", ".join(f"{n} {state}" for state, n in states.items()),
                count(max(c.tokens for c in done)) if done else "–",
                clock(statistics.median(c.seconds for c in done)) if done else "–",
                ", ".join(dict.fromkeys(f"`{c.config}`" for c in cells)),
                ", ".join(dict.fromkeys(f"`{c.commit[:12]}`" for c in ran if c.commit)) or "–",
                ", ".join(dict.fromkeys(c.hardware for c in ran if c.hardware)) or "–",
            )
        )
        commands += [cells[0].command] if cells[0].command else []
    header = ("run", "state", results.unit, "time", "config", "commit", "hardware")
    packages = {f"{k} {v}" for cell in results.cells for k, v in cell.versions.items()}
    lines = markdown_table(header, rows)
    if results.overrides:
        changed = ", ".join(f"`{word}`" for word in results.overrides)
        lines += ["", f"Overrides of all runs: {changed}."]
    lines += ["", f"Libraries: {', '.join(sorted(packages))}."] if packages else []
    return [*lines, "", "Commands of the first seed:", "", "```sh", *commands, "```"]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
