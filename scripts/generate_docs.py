"""Rewrite the generated tables of the documentation; ``make docs`` runs it.

A table stands between ``<!-- generated: TABLE ARGUMENT -->`` and ``<!-- end -->``. It is made from
the registry, the option dataclasses, the YAML files, ``benchmarks/results`` and the records of
``results``, so that a name, a default or a measured number is written down once.

    python scripts/generate_docs.py           rewrite stale tables, print the files
    python scripts/generate_docs.py --check   rewrite nothing; exit code 1 if a table is stale
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import functools
import inspect
import io
import itertools
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from sparsepretrain import registry
from sparsepretrain.config.compose import compose
from sparsepretrain.config.places import shipped
from sparsepretrain.errors import ConfigError
from sparsepretrain.reports.differences import Difference
from sparsepretrain.sparsity import MethodOptions
from sparsepretrain.sparsity.method import typical_row
from sparsepretrain.sparsity.operand_table import COLUMNS
from sparsepretrain.studies import sizes, tables
from sparsepretrain.studies.cells import seeds_text
from sparsepretrain.studies.claims import Verdict
from sparsepretrain.studies.ran import what_ran
from sparsepretrain.studies.results import TableResults, chosen, read_record
from sparsepretrain.studies.table_page import counted, judged, scaled

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "methods"
MEASURED = ROOT / "benchmarks" / "results" / "cpu.json"
DOCUMENTS = ROOT / "benchmarks" / "results" / "documents.json"
TRANSPOSABLE = ROOT / "benchmarks" / "results" / "transposable.json"
RECORDS = ROOT / "results" / "records"
CELLS = ROOT / "results" / "cells.csv"
RELIABILITY = ROOT / "docs" / "reliability.json"
DETERMINISM = ROOT / "docs" / "determinism.json"

OPERAND_NAMES = {"X": "input", "G": "output gradient"}
"""Letter of an operand that is not a weight -> its name in the table of methods."""

VERDICTS = typing.get_args(Verdict)

load_table, recorded = functools.cache(tables.load_table), functools.cache(read_record)

BLOCK = re.compile(
    r"(?P<start><!-- generated: (?P<table>\w+)(?: (?P<argument>[^\n>]+?))? -->\n)"
    r"(?P<body>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
YAML_LINE = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#]*?))?(?: *# *(?P<note>.*))?")


class Key(NamedTuple):
    """Value and comment of a key, as written in a YAML file."""

    value: str
    comment: str


def documents() -> list[Path]:
    """Return the Markdown files at the root, below ``docs``, in ``results`` and in ``examples``."""
    folders = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]
    return sorted([*ROOT.glob("*.md"), *folders, *(ROOT / "examples").glob("*.md")])


def render(text: str, path: Path) -> str:
    """Return ``text``, the contents of ``path``, with every generated table up to date."""

    def replace(block: re.Match[str]) -> str:
        if block["table"] not in TABLES:
            raise SystemExit(f"{path}: no generated table is called {block['table']!r}")
        return block["start"] + TABLES[block["table"]](block["argument"] or "", path) + block["end"]

    return BLOCK.sub(replace, text)


def main(arguments: list[str]) -> int:
    """Rewrite and list stale documents; with ``--check`` only list them."""
    stale = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new = render(text, path)
        if new != text:
            stale.append(path)
            if "--check" not in arguments:
                path.write_text(new, encoding="utf-8")
    cells = cells_of(records())
    if not CELLS.is_file() or CELLS.read_text(encoding="utf-8") != cells:
        stale.append(CELLS)
        if "--check" not in arguments:
            CELLS.write_text(cells, encoding="utf-8")
    for path in stale:
        print(path.relative_to(ROOT))
    return 1 if stale and "--check" in arguments else 0


# ----------------------------------------------------------------------------------------- tables


def options(method: str, path: Path) -> str:
    """Return one row per key of a method: type, default, meaning."""
    cls = registry.get("method", method).Options  # type: ignore[attr-defined]
    written = yaml_keys(shipped() / "sparsity" / f"{method}.yaml")
    own, shared = docstrings(cls), docstrings(MethodOptions)
    rows = []
    # the method's own keys first, then the shared ones
    for key, annotation in sorted(leaves(cls), key=lambda leaf: leaf[0].split(".")[0] in SHARED):
        # a method's YAML file explains the shared keys for that method
        meaning = written[key].comment if key.partition(".")[0] in SHARED else own.get(key, "")
        meaning = meaning or shared.get(key, "") or written[key].comment
        rows.append([f"`{key}`", type_words(annotation), f"`{written[key].value}`", prose(meaning)])
    return table(["key", "type", "default", "meaning"], rows)


def operands(method: str, path: Path) -> str:
    """Return the row of one method in the operand table."""
    row = typical_row(method, registry.get("method", method))
    cells = table(list(COLUMNS.values()), [[prose(str(cell)) for cell in row]])
    return f"[Operands of the matmuls](README.md), and the gradient for the optimizer:\n\n{cells}"


def methods(_: str, path: Path) -> str:
    """Return the operand table of all methods, with links to their pages."""
    rows = []
    for name in registry.built_in("method"):
        method: Any = registry.get("method", name)
        page = os.path.relpath(PAGES / f"{name}.md", path.parent)
        cells = [prose(cell.text) for cell in typical_row(name, method)]
        cells += [prose(method.summary)]
        rows.append([f"[`{name}`]({page})", *cells, linked(method.paper)])
    return table(["method", *COLUMNS.values(), "in words", "paper"], rows)


def overview(_: str, path: Path) -> str:
    """Return one row per method: paper, sparse operands, weights at the end, when to use it."""
    rows = []
    for name, purpose in purpose_of_methods().items():
        method: Any = registry.get("method", name)
        page = os.path.relpath(PAGES / f"{name}.md", path.parent)
        papers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", method.paper)
        links = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in papers)
        shown = f"[`{name}`]({page})" + (f" ({links})" if links else "")
        cells = sparse_operands(typical_row(name, method))
        if method.dense_training:
            when = "at the end" if method.prunes_at_end else "in evaluation"
            cells = [f"weight, {when}" if cell == "weight" else cell for cell in cells]
        rows.append([shown, *cells, final_weights(name, method), purpose])
    heads = ["method (paper)", "forward", "input gradient", "weight gradient", "ends", "use it for"]
    return table(heads, rows)


def final_weights(name: str, method: Any) -> str:
    """Return ``N:M`` if a whole run with default options ends with N:M weights, else ``dense``."""
    ended = method(method.Options(name=name), 1000)
    evaluated = ended.phase_of(1000).evaluation  # with the operands of the method
    return "N:M" if evaluated and ended.sparse_row.A.pattern else "dense"


def purpose_of_methods() -> dict[str, str]:
    """Return method -> when to use it, from its page, in the order of the papers."""

    def published(name: str) -> str:
        found = re.search(r"arXiv:([\d.]+)", registry.get("method", name).paper)
        return found[1] if found else ""

    purposes = {}
    for name in sorted(registry.built_in("method"), key=published):
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        found = re.search(r"^Use it for (.*?)\.$", text, re.MULTILINE)
        if found is None:
            raise ConfigError(f"{name}.md: expected a line 'Use it for ….'")
        purposes[name] = found[1]
    return purposes


def sparse_operands(row: Any) -> list[str]:
    """Return the N:M operand of fprop, dgrad and wgrad of a method, in words."""
    weights = {row.A.text, row.B.text}
    cells = []
    for operands in row.operands.values():
        names = [
            "weight" if operand.text in weights else OPERAND_NAMES[operand.text[-2]]
            for operand in operands
            if operand.pattern
        ]
        cells.append(" and ".join(names) or "–")
    return cells


def purposes(_: str, path: Path) -> str:
    """Return one row per method: when to use it."""
    rows = []
    for name, purpose in purpose_of_methods().items():
        page = os.path.relpath(PAGES / f"{name}.md", path.parent)
        rows.append([f"[`{name}`]({page})", purpose])
    return table(["method", "when to use it"], rows)


def costs(method: str, path: Path) -> str:
    """Return the committed benchmark cases of one method."""
    found = bench(rf"(step time|peak memory), {re.escape(method)}\b.* over ", path)
    if found:
        return found
    return (
        f"No measurement of `{method}` is committed. To compare: tokens/s in the reports of\n"
        f"`sparsepretrain train sparsity={method}` and `sparsepretrain train sparsity=dense`.\n"
    )


def bench(pattern: str, path: Path) -> str:
    """Return the committed CPU benchmark cases whose names match, or an empty string.

    A case that was measured with several numbers of threads is one row.
    """
    record = json.loads(MEASURED.read_text(encoding="utf-8"))
    by_threads: dict[str, dict[str, str]] = {}
    others = []
    for case in record["cases"]:
        if not re.match(pattern, case["name"]):
            continue
        value = f"{case['value']:.3f}"
        if found := re.fullmatch(r"(.*), (\d+ threads?)", case["name"]):
            by_threads.setdefault(found[1], {})[found[2]] = value
        else:
            others.append([case["name"], value])
    if not by_threads and not others:
        return ""
    threads = sorted({count for values in by_threads.values() for count in values})
    rows = [[name, *(values[count] for count in threads)] for name, values in by_threads.items()]
    tables = [table(["ratio", *threads], rows)] if rows else []
    tables += [table(["ratio", "measured"], others)] if others else []
    about = "`gpt2_nano`; step times are medians of interleaved ratios in one process"
    return "\n".join(tables) + measured_on(record, about, MEASURED, path, "make bench")


def measured_on(record: dict[str, Any], about: str, raw: Path, path: Path, again: str) -> str:
    """Return the paragraph below a table of measurements: hardware, versions, command."""
    environment = record["environment"]
    hardware, versions = environment["hardware"], environment["packages"]
    source = (
        f"{hardware['cores']} cores of an {hardware['device']}, torch {versions['torch']}, "
        f"NumPy {versions['numpy']}, commit {environment['commit']}; {about} "
        f"([raw results]({os.path.relpath(raw, path.parent)})). Again: `{again}`."
    )
    return f"\n{textwrap.fill(source, 100, break_long_words=False, break_on_hyphens=False)}\n"


def prepared_documents(_: str, path: Path) -> str:
    """Return the committed times and memory of finding documents."""
    record = json.loads(DOCUMENTS.read_text(encoding="utf-8"))
    rows = []
    for case in record["cases"]:
        _, way, state = case["name"].split(", ")
        detail = case["detail"]
        memory = [f"{detail[key]:,.0f} MB" for key in ("peak", "private")]
        seconds = [f"{value:.2g} s" for value in (case["value"], detail["cpu seconds"])]
        rows.append([way, state, *seconds, *memory])
    about = (
        f"{detail['token bytes'] / 1e9:g} GB of tokens with {detail['documents']:,} documents; "
        f"fastest of {detail['processes']} processes"
    )
    head = ["documents from", "page cache", "time", "CPU time", "peak memory", "private memory"]
    command = "python benchmarks/documents.py --out benchmarks/results/documents.json"
    return table(head, rows) + measured_on(record, about, DOCUMENTS, path, command)


def transposable(_: str, path: Path) -> str:
    """Return the committed distances of TSENOR's masks from the optimum, and times of a search."""
    record = json.loads(TRANSPOSABLE.read_text(encoding="utf-8"))
    cases = {case["name"]: case for case in record["cases"]}
    rows = []
    for name, case in cases.items():
        kind, pattern = name.split(", ")
        if kind != "gap":
            continue
        detail = case["detail"]
        share = cases[f"step, {pattern}"]["value"]
        values = [f"{case['value']:.3f} %", f"{detail['largest percent']:.1f} %"]
        optimal = f"{detail['optimal blocks']:,} of {detail['blocks']:,}"
        rows.append([pattern, *values, optimal, f"{share:.1f} %"])
    about = (
        "blocks of normal weights; one thread; a step is one of `gpt2_nano` under `tsrste`, "
        "with a search in 40 steps"
    )
    head = ["pattern", "mean gap", "largest gap", "optimal blocks", "search per step"]
    command = "python benchmarks/transposable.py --out benchmarks/results/transposable.json"
    return table(head, rows) + measured_on(record, about, TRANSPOSABLE, path, command)


def recipes(task: str, path: Path) -> str:
    """Return one row per model recipe of a task: data, optimizer, length."""
    rows = []
    for name in sorted(file.stem for file in (shipped() / "model").glob("*.yaml")):
        plain = compose([f"model={name}"])
        if plain["task"]["name"] != task or name == "pretrained":
            continue
        batch, steps = plain["batch"]["size"], plain["steps"]
        length = f"{steps:,} × {batch}" if steps else f"{plain['epochs']:g} epochs"
        optimizer = f"{plain['optim']['name']}, {plain['optim']['lr']:g}"
        link = os.path.relpath(ROOT / "configs" / "model" / f"{name}.yaml", path.parent)
        shown = f"[`{name}`]({link})"
        rows.append([shown, f"`{plain['data']['name']}`", optimizer, length])
    return table(["`model=`", "`data=`", "optimizer, peak learning rate", "steps × samples"], rows)


def reports(_: str, path: Path) -> str:
    """Return one row per committed page: runs, commit, how its claims came out."""
    rows = []
    for name, found in records().items():
        if not has_page(found):
            continue
        parts = [*found.all()]
        states = [cell.state for part in parts for cell in part.cells]
        commits = dict.fromkeys(c.commit[:12] for part in parts for c in part.cells if c.commit)
        counts = Counter(ruling.verdict for _, ruling in judgments(found))
        title = f"[{prose(title_of(found))}]({page(name, path)}.md)"
        done = f"{states.count('finished')} of {len(states)}"
        verdicts = [str(counts[verdict] or "–") for verdict in VERDICTS]
        rows.append([title, done, ", ".join(commits), *verdicts])
    return table(["table", "runs", "commit", *VERDICTS], rows)


def unheld(_: str, path: Path) -> str:
    """Return the claims of the committed tables that did not hold, by table and verdict."""
    claims: dict[tuple[str, str], list[str]] = {}
    for name, found in records().items():
        if found.parts or not has_page(found):
            continue  # its parts have records of their own
        for claim, ruling in judgments(found):
            if ruling.verdict != "held":
                link = f"[`{name}`]({page(name, path)}.md)"
                claims.setdefault((link, ruling.verdict), []).append(prose(claim.text))
    rows = [[*where, "; ".join(texts)] for where, texts in claims.items()]
    return table(["table", "verdict", "claims"], rows)


def verdicts(_: str, path: Path) -> str:
    """Return how the claims of all committed tables with ended runs came out, in one sentence."""
    # claims of a collecting table are those of its parts
    tables = [
        found
        for found in records().values()
        if not found.parts
        and has_page(found)
        and all(cell.state in ("finished", "failed") for cell in found.cells)
    ]
    rulings = [[ruling for _, ruling in judgments(found)] for found in tables]
    tested = [each for each in rulings if each]
    number = sum(map(len, tested))
    text = f"Of {number} claims in [{len(tested)} tables](results/README.md), {counted(tested)}."
    return "\n".join([*textwrap.wrap(text, 120), ""])


def stand_ins(_: str, path: Path) -> str:
    """Return one row per committed table whose runs decide none of its claims."""
    rows = []
    for name, found in records().items():
        if has_page(found):
            continue
        ran = dict(what_ran(scaled(found, load_table(name))[0]))
        finished = sum(cell.state == "finished" for cell in found.cells)
        reasons = dict.fromkeys(
            "too few seeds" if ruling.verdict == "not decided" else ruling.why
            for _, ruling in judgments(found)
        )
        why = "; ".join(reasons) or "the claims are about cells without a small version"
        cells = [prose(title_of(found)), ran["parameters"], ran["steps"]]
        done = f"{finished} of {len(found.cells)}"
        rows.append([*cells, done, prose(why), f"`sparsepretrain reproduce {name}`"])
    heads = ["table", "parameters", "steps", "runs", "why no verdict", "command"]
    return table(heads, rows)


def has_page(found: TableResults) -> bool:
    """Return True if a claim of the table is decided, or it has none at any scale."""
    claims = [claim for part in found.all() for claim in load_table(part.name).claims]
    verdicts = {ruling.verdict for _, ruling in judgments(found)}
    return not claims or not verdicts.isdisjoint(("held", "contradicted"))


def title_of(found: TableResults) -> str:
    """Return the title of a table as its page shows it."""
    return scaled(found, load_table(found.name))[1].title


def judgments(found: TableResults) -> Iterator[tuple[Any, Any]]:
    """Yield (claim, ruling) of a record and of its parts."""
    for part in found.all():
        yield from judged(part, load_table(part.name))


def machines(_: str, path: Path) -> str:
    """Return scale, seeds, dates, hardware and library versions of all committed runs."""
    parts = [part for found in records().values() for part in found.all()]
    cells = [cell for part in parts for cell in part.cells if cell.state != "missing"]
    libraries = Counter(" ".join(pair) for cell in cells for pair in cell.versions.items())
    lists = {
        "Scale": sorted({str(part.scale) for part in parts}),
        "Seeds": [str(seed) for seed in sorted({cell.seed for cell in cells})],
        "Dates": sorted({cell.date for cell in cells}),
        "Hardware": sorted({cell.hardware for cell in cells}),
        "Libraries": [
            name if count == len(cells) else f"{name} (some runs)"
            for name, count in sorted(libraries.items())
        ],
    }
    lines = []
    for label, values in lists.items():
        lines += textwrap.wrap(f"- {label}: {', '.join(values)}", 120, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def compared(name: str, path: Path) -> str:
    """Return the rows of a tuned table, ranked: percent above the baseline, setting, cost."""
    if name not in records():
        return f"Not run yet: `sparsepretrain reproduce {name} && sparsepretrain report {name}`.\n"
    found, about = scaled(records()[name], load_table(name))
    key, metric = next(iter(about.metrics.items()))
    values, settings = found.compared(key, about), chosen(found.tuning, about)
    cost, baseline = found.costs(about.baseline), about.baseline or ""
    differences = {row: Difference(row, [*values[row].values()]) for row in about.rows}
    rows = []
    for row, d in sorted(differences.items(), key=lambda item: item[1].mean):
        half = d.interval()[1] - d.mean
        percent = "–" if row == baseline else f"{d.mean:+.1f} ± {half:.1f}"
        setting = " ".join(f"`{word}`" for word in settings[row].split())
        rows.append([row, percent, f"{cost[row][0]:.2g}", f"{cost[row][1]:.0f}", setting])
    title, unit = prose(about.title), (metric.variant or "").partition(";")[0]
    text = (
        f"[{title}]({page(name, path)}.md): {metric.label} at the end ({unit}), relative to "
        f"{baseline} with the same seed, with 95 % intervals. {again(name, found)}"
    )
    text = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
    heads = ["method", f"% above {baseline}", "2:4 matmuls per layer", "FLOPs, %", "tuned setting"]
    return f"{text}\n\n{table(heads, rows)}"


def gaps(argument: str, path: Path) -> str:
    """Return the gaps to dense by model size; ``argument``: table and tokens per parameter."""
    name, data = argument.split()
    found, about = scaled(records()[name], load_table(name))
    at_equal_tokens = sizes.gaps(found, about, None)
    at_equal_flops = sizes.trained_gaps(found, about)
    every = sorted({n for by_place in at_equal_tokens.values() for n, _ in by_place})
    rows = []
    for by_row, suffix in (at_equal_tokens, ""), (at_equal_flops, ", at equal FLOPs"):
        for row, by_place in by_row.items():
            by_size = sizes.over_sizes(by_place, int(data))
            texts = (sizes.gap_text(by_size[n]) if n in by_size else "–" for n in every)
            rows.append([f"{row}{suffix}", *texts])
    return table([f"% above {about.baseline}", *(f"{n:,} parameters" for n in every)], rows)


def records() -> dict[str, TableResults]:
    """Return name -> committed results of each table."""
    files = sorted(RECORDS.glob("*.json.gz"))
    return {file.name.partition(".")[0]: recorded(file) for file in files}


def cells_of(tables: Mapping[str, TableResults]) -> str:
    """Return a CSV with a line per metric of each finished cell of the committed tables."""
    head = (
        "table,row,column,seed,method,pattern,model,task,data,metric,value,steps,items,flops,"
        "matmuls_24,parameters,nonzero,seconds,date,commit,hardware"
    )
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head.split(","))
    for name, found in tables.items():
        for cell in [] if found.parts else found.cells:
            if cell.state != "finished":
                continue
            run = json.loads(found.configs[cell.config])
            sparsity, model = run["sparsity"], run["model"]["name"]
            # dense runs have none, also where they were pruned afterwards: the row says it
            is_dense = sparsity["name"] == "dense"
            pattern = "" if is_dense else f"{sparsity['n']}:{sparsity['m']}"
            about = (name, cell.row, cell.column, cell.seed, sparsity["name"], pattern, model)
            cost = (cell.steps, f"{cell.tokens:.0f}", cell.flops, cell.sparse_matmuls)
            size = (cell.parameters or None, cell.nonzero or None)
            place = (f"{cell.seconds:.1f}", cell.date, cell.commit[:12], cell.hardware)
            for metric, value in cell.metrics.items():
                number = (run["task"]["name"], run["data"]["name"], metric, value)
                writer.writerow([*about, *number, *cost, *size, *place])
    return out.getvalue()


def page(name: str, path: Path) -> str:
    """Return the path of a table's page relative to a document, without suffix."""
    return os.path.relpath(RECORDS.parent / name, path.parent)


def again(name: str, results: TableResults) -> str:
    """Return command, scale, seeds, dates, commit and hardware of the runs of a table."""
    cells = [cell for part in results.all() for cell in part.cells if cell.state != "missing"]
    seeds, dates = sorted({cell.seed for cell in cells}), sorted({cell.date for cell in cells})
    scales = dict.fromkeys(part.scale for part in results.all() if part.scale)
    return (
        f"`sparsepretrain reproduce {name} && sparsepretrain report {name}`; "
        f"scale {', '.join(scales)}, seeds {seeds_text(seeds)}, "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}, "
        f"commit {', '.join(dict.fromkeys(cell.commit[:12] for cell in cells))}, "
        f"{'; '.join(dict.fromkeys(cell.hardware for cell in cells))}."
    )


def reliability(_: str, path: Path) -> str:
    """Return one row per requirement: injected faults, their number, result, gate."""
    rows = []
    found = json.loads(RELIABILITY.read_text(encoding="utf-8"))
    requirements = path.parents[1] / "tests" / "suites" / "reliability" / "requirements.yaml"
    for row in yaml.safe_load(requirements.read_text(encoding="utf-8")):
        count, result = "", "no test yet"
        if row["id"] in found:
            one = found[row["id"]]
            count = f"{one['injected']:,} in {one['cases']}"
            result = f"{one['failed']} **failed**" if one["failed"] else "passed"
            result += f", {one['skipped']} left out" if one["skipped"] else ""
            result += f": {one['reported']}" if one.get("reported") else ""
            result += f" ({one['commit']})"
        elif row.get("tests"):
            result = "not run"
        rows.append([row["id"], row["injected"], count, result, row["gate"]])
    return table(["", "injected", "how many in cases", "result (commit)", "gate"], rows)


def determinism(part: str, path: Path) -> str:
    """Return a table of the contract: fp32, pairs, refused, gpu, mutants, costs, operators, ran."""
    found = json.loads(DETERMINISM.read_text(encoding="utf-8"))
    cases = {tuple(name.split()): entry for name, entry in found["cases"].items()}
    return CONTRACT[part](found, cases)


Cases = dict[tuple[str, ...], dict[str, Any]]
"""(method, precision, parallel, compile) -> result."""
OTHER_CPUS = ("older CPU", "another CPU")


def contract_fp32(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per method in fp32, eager."""
    kinds = ("single", "ddp", "fsdp")
    rows = []
    for method in registry.built_in("method"):
        own = [cases.get((method, "fp32", kind, "none"), {}) for kind in kinds]
        bound = max([c["gates"]["older CPU"]["bound"] for c in own if c.get("gates")], default=0.0)
        others = [contract_drift(own, gate) for gate in OTHER_CPUS]
        rows.append([f"`{method}`", *map(contract_cell, own), *others, small(bound)])
    return table(["method", *(f"`{kind}`" for kind in kinds), *OTHER_CPUS, "bound"], rows)


def contract_drift(cases: Sequence[dict[str, Any]], gate: str) -> str:
    """Return the greatest difference of a loss on another CPU; a dash if none was measured."""
    gates = [case["gates"][gate] for case in cases if gate in case.get("gates", {})]
    return small(max(one["drift"] for one in gates)) if gates else "–"


def small(number: float) -> str:
    """Return a difference with one digit."""
    return f"{number:.0e}" if number else "0"


def contract_cell(case: dict[str, Any]) -> str:
    """Return the verdict of a case and its loss difference with other ranks."""
    if not case:
        return "not run"
    if "refused" in case:
        return "refused"
    if "error" in case:
        return "**failed**"
    failed = [name for name, gate in case["gates"].items() if not gate["passed"]]
    other = case["gates"]["resume elsewhere"]
    equal = "differ" in other
    return (
        f"**failed: {', '.join(failed)}**" if failed else "bits" if equal else small(other["drift"])
    )


def contract_pairs(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per case of the pairs."""
    rows = []
    for words, case in sorted(cases.items()):
        method, *rest = words
        if (rest[0] == "fp32" and rest[1] != "tree" and rest[2] == "none") or "refused" in case:
            continue
        bounds = {gate["bound"] for gate in case.get("gates", {}).values() if "bound" in gate}
        bound = small(max(bounds)) if bounds else "–"
        others = [contract_drift([case], gate) for gate in OTHER_CPUS]
        rows.append([f"`{method}`", *rest, contract_cell(case), bound, *others])
    head = ["method", "precision", "parallel", "compile", "other ranks", "bound", *OTHER_CPUS]
    return table(head, rows)


def contract_refused(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per refused combination, with its message."""
    rows = [
        [f"`precision={words[1]}` with `parallel={words[2]}`", case["refused"]]
        for words, case in sorted(cases.items())
        if "refused" in case
    ]
    return table(["combination", "message"], rows)


def contract_on_gpus(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per precision and parallelism of the cases that ran on GPUs."""
    measured = found.get("cases on cuda", {})
    kinds = sorted({words[1:] for words in cases})
    rows = []
    for kind in kinds:
        own = [entry for name, entry in measured.items() if tuple(name.split()[1:]) == kind]
        passed = sum(entry.get("passed", "refused" in entry) for entry in own)
        rows.append([*kind, f"{passed} of {len(own)} passed" if own else "not measured"])
    return table(["precision", "parallel", "compile", "gates 1 to 3"], rows)


def contract_mutants(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per mutant, with the gate that noticed it."""
    rows = []
    for name, one in found["mutants"].items():
        number = {"repeat": "1", "golden": "2"}.get(one["gate"], "3")
        seen = "noticed" if one.get("noticed") else "**not noticed**"
        parts = ", ".join(one.get("differ", []))
        rows.append([number, name, one.get("case", ""), f"{seen}: {parts}"])
    return table(["gate", "mutant", "case", "result"], sorted(rows))


def contract_costs(found: dict[str, Any], cases: Cases) -> str:
    """Return the time of a step relative to one without the key."""
    rows = []
    for name, one in found["costs"].items():
        low, high = one["quartiles"]
        with_key, without = (f"{1e3 * seconds:.0f} ms" for seconds in one["median_seconds"])
        key, _, ranks = name.partition(", ")
        quartiles = f"{low:.2f} to {high:.2f}"
        rows.append([f"`{key}`", ranks, f"{one['ratio']:.2f}", quartiles, with_key, without])
    return table(["key", "ranks", "median ratio", "quartiles", "a step", "without"], rows)


def contract_operators(found: dict[str, Any], cases: Cases) -> str:
    """Return a row per operator: does it repeat its bits on a CPU, and what is known of CUDA."""
    rows = []
    for name, one in found["operators"].items():
        own = one["of"] != "torch"
        if own and name.rpartition(", ")[2] == "reference":
            continue
        cells = [contract_word(one.get(f"{count} threads")) for count in (1, 2)]
        cells.append(contract_word(one.get("deterministic=true")))
        cells.append(contract_word(one.get("any threads")))
        title = name.rpartition(", ")[0] if own else name
        cuda = "not measured" if own else one.get("cuda", "–")
        rows.append([title, "ours (Numba)" if own else "torch", *cells, cuda])
    rows.sort(key=lambda row: (row[1] != "torch", row[0].lower()))
    others = [e for name, e in found["operators"].items() if name.endswith(", reference")]
    passed = sum(bool(entry["passed"]) for entry in others)
    text = (
        f"\nThe PyTorch references of our kernels: {passed} of {len(others)} repeat their bits.\n"
    )
    head = ["operator", "of", "1 thread", "2 threads", "2 threads, `deterministic=true`"]
    return table([*head, "1 and 2 threads agree", "CUDA, as documented by torch"], rows) + text


def contract_word(value: bool | None) -> str:
    """Return a verdict as a word; nothing where the question does not arise."""
    return "" if value is None else "yes" if value else "**no**"


def contract_ran(found: dict[str, Any], cases: Cases) -> str:
    """Return what ran, where, and how gate 2 was decided."""
    planned = found["contract"]["cases"]
    judged = [case["gates"] for case in cases.values() if "gates" in case]
    failed = sum(not case.get("passed", True) for case in cases.values())
    refused = sum("refused" in case for case in cases.values())
    recorded = sum(gates["golden"].get("how") == "recorded" for gates in judged)
    equal = sum(gates["golden"].get("how", "").startswith("bits") for gates in judged)
    seconds = sum(case.get("seconds", 0) for case in cases.values())
    commits = ", ".join(sorted({case["commit"] for case in cases.values()}))
    lines = [
        f"- Cases: {len(cases)} of {len(planned)} ran: {len(judged)} were judged, of which "
        f"{failed} failed, and {refused} were refused. {seconds / 60:.0f} minutes, two cases at a "
        "time.",
        f"- Gate 2: {equal} equal the golden bits of an earlier run, {recorded} were recorded.",
        f"- Commit of the code that trains: {commits}.",
    ]
    elsewhere = [gates["another CPU"] for gates in judged if "another CPU" in gates]
    for cpu, commit in sorted({(gate["cpu"], gate["commit"]) for gate in elsewhere}):
        own = [gate for gate in elsewhere if (gate["cpu"], gate["commit"]) == (cpu, commit)]
        near = sum(gate["passed"] for gate in own)
        lines.append(
            f"- Gate 2 on another CPU ({cpu.partition(', torch')[0]}, commit {commit}): the "
            f"losses of {near} of {len(own)} cases are within the bound of those above."
        )
    margins = sorted(
        (gate["bound"] / gate["drift"], " ".join(words), name)
        for words, case in cases.items()
        for name, gate in case.get("gates", {}).items()
        if gate.get("bound") and gate["drift"]
    )
    if len(margins) > 1:
        (least, closest, gate), (second, *_), *_ = margins
        lines.append(
            f"- Closest to its bound: `{closest}` ({gate}), {least:.1f} times below it; all other "
            f"differences are {second:.0f} to {margins[-1][0]:,.0f} times below theirs, or zero."
        )
    if left := [f"`{name}`" for name in planned if tuple(name.split()) not in cases]:
        lines.insert(1, f"- Not run yet: {', '.join(left)}.")
    for name, machine in found["hardware"].items():
        lines.append(
            f"- {name}, {machine['cores']} cores, Python {machine['python']}, "
            f"{machine['system']}, {machine['date']}."
        )
    return "\n".join(lines) + "\n"


CONTRACT: dict[str, Callable[[dict[str, Any], Cases], str]] = {
    "costs": contract_costs,
    "fp32": contract_fp32,
    "gpu": contract_on_gpus,
    "mutants": contract_mutants,
    "operators": contract_operators,
    "pairs": contract_pairs,
    "ran": contract_ran,
    "refused": contract_refused,
}
"""Argument of the table ``determinism`` -> what makes it."""


TABLES: dict[str, Callable[[str, Path], str]] = {
    "bench": bench,
    "compared": compared,
    "costs": costs,
    "determinism": determinism,
    "documents": prepared_documents,
    "gaps": gaps,
    "machines": machines,
    "methods": methods,
    "operands": operands,
    "options": options,
    "overview": overview,
    "purposes": purposes,
    "recipes": recipes,
    "reliability": reliability,
    "reports": reports,
    "stand_ins": stand_ins,
    "transposable": transposable,
    "unheld": unheld,
    "verdicts": verdicts,
}


SHARED = {f.name for f in dataclasses.fields(MethodOptions)}
"""Keys that every method has."""


# ---------------------------------------------------------------------------------------- sources


def leaves(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and type of each option; the field ``name`` is not an option."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from (
                (f"{field.name}.{key}", kind) for key, kind in leaves(typing.cast(type, hint))
            )
        elif field.name != "name":
            yield field.name, hint


def docstrings(cls: type) -> dict[str, str]:
    """Return field -> the string literal that follows it, base classes included."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        body = typing.cast(
            ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        ).body
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


def yaml_keys(file: Path) -> dict[str, Key]:
    """Return dotted key -> value and comment as written; a comment may be on the line above."""
    found: dict[str, Key] = {}
    group, above = "", ""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            above = f"{above} {text.lstrip('# ')}".strip()
            continue
        entry = YAML_LINE.fullmatch(line)
        if entry is not None:
            inside = group if entry["indent"] else ""
            if not entry["value"]:
                group = entry["key"] + "."
            found[inside + entry["key"]] = Key(entry["value"] or "", entry["note"] or above)
        above = ""
    return found


# --------------------------------------------------------------------------------------- Markdown


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def type_words(annotation: Any) -> str:
    """Describe the values of a type as users write them."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(part) for part in arguments)
    if origin is tuple:
        return "[" + ", ".join(type_words(part) for part in arguments) + "]"
    if origin is list:
        return "list of " + type_words(arguments[0])
    return "null" if annotation is type(None) else annotation.__name__


def prose(text: str) -> str:
    """Escape Markdown for a table cell, except code spans."""
    spans = re.split(r"(`+[^`]*`+)", text)
    spans[::2] = [re.sub(r"([*_<])", r"\\\1", span) for span in spans[::2]]
    spans[1::2] = [f"`{span.strip('`')}`" for span in spans[1::2]]
    return "".join(spans).replace("|", "\\|")


def linked(paper: str) -> str:
    """Turn each ``arXiv:…`` into a link."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[\1](https://arxiv.org/abs/\1)", paper)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
