#!/usr/bin/env python3
"""Write the tables of figures in README.md and docs/ anew from RESULTS.md, so that a figure stands in one place only.

    benchmarks/tables.py            write them
    benchmarks/tables.py --check    say which are not as RESULTS.md has it; exit status 1 if one is not

A table stands between two comments of the document, `<!-- figures: NAME -->` and `<!-- figures end -->`. A cell has
the median and, in brackets, the spread: the largest round less the smallest; of a single round there is none. `run_all`
writes the tables when it ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
DOCUMENTS = ("README.md", "docs/batch.md", "docs/batching.md")


@dataclasses.dataclass(frozen=True)
class Beside:
    """A peer in a row: its words, its figure, and the figure of the ratio (ours to its)."""

    words: str
    figure: str
    ratio: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement: its words, our figures (of which only the first has its spread shown), and the peers'."""

    words: str
    figures: tuple[str, ...]
    unit: str = ""
    beside: tuple[Beside, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of figures, each named as in RESULTS.md: by its benchmark's section, then by itself."""

    section: str
    rows: tuple[Row, ...]


TABLES: Mapping[str, tuple[Table, ...]] = {
    "dispatch": (
        Table("dispatch-embedded", (
            Row("calls/s, one in flight per worker", ("calls_per_s",), "", (
                Beside("`ProcessPoolExecutor`", "calls_per_s_processpool", "calls_vs_processpool"),
                Beside("Parsl's HTEX", "calls_per_s_htex", "calls_vs_htex"),
            )),
            Row("calls/s, a burst through a Parsl app", ("burst_calls_per_s",), "", (
                Beside("HTEX", "burst_calls_per_s_htex", "burst_vs_htex"),
            )),
            Row("items/s through `map`", ("map_items_per_s",), "", (
                Beside("`ProcessPoolExecutor`, fed chunks of the same size",
                       "map_items_per_s_processpool_chunked", "map_vs_processpool_chunked"),
                Beside("HTEX, fed chunks of the same size", "map_items_per_s_htex_chunked", "map_vs_htex_chunked"),
                Beside("HTEX, one task per item", "map_items_per_s_htex", "map_vs_htex"),
            )),
            Row("first result from a cold start", ("first_result_s",), " s", (
                Beside("HTEX", "first_result_s_htex"),
            )),
            Row("memory of 1,000,000 items from a generator", ("map_memory_mb",), " MB"),
        )),
    ),
    "cluster": (
        Table("dispatch-taskvine", (
            Row("calls/s, one in flight per worker, 2 workers", ("calls_per_s",), "", (
                Beside("a plain ndcctools loop, its fastest mode", "calls_per_s_ndcctools", "calls_vs_ndcctools"),
                Beside("Parsl's TaskVineExecutor (serverless)", "calls_per_s_parsl_taskvine",
                       "calls_vs_parsl_taskvine"),
            )),
            Row("latency of a call, p50, p99.9 and maximum of 20,000", ("call_p50", "call_p999", "call_max"), " ms"),
            Row("calls/s with twelve slow unauthenticated connections at the port, relative to none",
                ("strangers_vs_alone",)),
        )),
        Table("staging", (
            Row("100 MB to 8 workers on 4 hosts of 200 Mbit/s", ("time_s",), " s", (
                Beside("the manager alone", "manager_only_time_s", "speedup_vs_manager_only"),
            )),
            Row("copies sent by the manager, received by each host", ("manager_copies", "copies_per_host"), "", (
                Beside("the manager alone sends", "manager_only_copies"),
            )),
        )),
        Table("levels-testbed", (
            Row("a real encoder, batches of 1", ("pervasive_batch1_s",), " s", (
                Beside('`level="partial"`', "partial_batch1_s", "partial_vs_pervasive_batch1"),
                Beside("its own best batch (10)", "pervasive_batch10_s", "pervasive_batch1_vs_best"),
            )),
        )),
    ),
    "endurance": (
        Table("soak", (
            Row("half an hour of bursts, with `kill -9` of a quarter of all processes ten times a second: items, kills",
                ("items", "kills")),
            Row("wrong results, contexts declared broken, items given up", ("wrong", "broken", "blamed")),
            Row("the driver's memory at the end, relative to that after a tenth", ("memory_growth",)),
        )),
        Table("long_life", (
            Row("an hour with 100,000 new declarations: the driver's memory and its workers', likewise",
                ("driver_growth", "workers_growth")),
        )),
        Table("bad-hosts-testbed", tuple(
            Row(words, (f"{name}_makespan_vs_absent", f"{name}_dead", f"{name}_named_s"))
            for words, name in (
                ("one of four hosts fails every call: makespan relative to a run without it, rows lost, seconds until "
                 "it is named",
                 "black_hole"),
                ("the same, from the middle of the run on", "black_hole_midway"),
                ("the host is ten times slower", "slow"),
                ("contexts cannot be built on it", "contexts"),
            )
        )),
    ),
    "engines": (
        Table("engines", (
            Row("tokens/s, vLLM in the library process", ("ctxflow_vllm_per_s",), "", (
                Beside("vLLM's `LLM.generate`, all prompts at once", "vllm_plain_per_s", "vllm_vs_plain"),
                Beside("the same, batches of 32 one after the other", "vllm_batches_per_s", "vllm_vs_batches"),
            )),
            Row("tokens/s, `vllm serve`", ("ctxflow_server_per_s",), "", (
                Beside("the same server, asked by OpenAI's client", "server_plain_per_s", "server_vs_plain"),
            )),
            Row("tokens/s, `llama-server`", ("ctxflow_llama_per_s",), "", (
                Beside("the same server, asked by OpenAI's client", "llama_plain_per_s", "llama_vs_plain"),
            )),
            Row("tokens/s, transformers", ("ctxflow_transformers_per_s",), "", (
                Beside("its own continuous batching", "transformers_own_per_s", "transformers_vs_own"),
                Beside("our generator that padded", "padded_per_s", "transformers_vs_padded"),
            )),
            Row("rows/s, embeddings, no option given", ("ctxflow_encoder_per_s",), "", (
                Beside("the best of a sweep of `--batch-size`", "encoder_best_per_s", "encoder_vs_best"),
            )),
            Row("the window that `opportunistic` chose over the best of a sweep: vLLM, `vllm serve`, `llama-server`, "
                "transformers", ("vllm_window_vs_sweep", "server_window_vs_sweep", "llama_window_vs_sweep",
                                 "transformers_window_vs_sweep")),
        )),
    ),
    "batch": (
        Table("batch", (
            Row("rows/s, from the opened input to the end", ("rows_per_s",)),
            Row("the driver's memory over its start", ("driver_memory_mb",), " MB"),
            Row("killed at half: from the next driver's start (Python's own included) to its first new result",
                ("resume_s",), " s"),
            Row("the same command again when all is done", ("finished_restart_s",), " s"),
        )),
    ),
    "windows": (
        Table("window_jobs", tuple(
            Row(words, tuple(f"{name}_{figure}" for figure in ("least", "median", "97")))
            for words, name in (
                ("64 to 256 items on one worker: the job's time", "few_job"),
                ("2,000 to 8,000 items, 1 to 4 workers of 1 or 2 kinds: the job's time", "many_job"),
                ("the windows at its end", "many_window"),
                ("1,500 to 5,000 long items, a worker lives for 1 to 16 minutes, notice of 0 to 30 s: the job's time",
                 "evicted_job"),
                ("the windows at its end", "evicted_window"),
            )
        )),
    ),
}  # fmt: skip

Cell = tuple[float, str]
"""A median, and its spread in brackets, empty after a single round."""
Results = Mapping[str, Mapping[str, Cell]]
"""By section and figure."""

_LINE = re.compile(r"\| `([^`]+)` \| ([-\d.,e+]+) \| ([-\d.,e+]+) \| .* \| (\d+) \|")
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- figures end -->)", re.DOTALL)


def results(text: str) -> Results:
    """The figures of RESULTS.md.

    >>> results("## calls\\n\\n| `calls_per_s` | 6,672.0 | 3,230.0 | calls/s | higher | 5 |\\n")
    {'calls': {'calls_per_s': (6672.0, ' (3,230)')}}
    """
    found: dict[str, dict[str, Cell]] = {}
    for part in ("\n" + text).split("\n## ")[1:]:
        name, _, lines = part.partition("\n")
        found[name] = {
            key: (_number(value), f" ({short(_number(spread))})" if rounds != "1" else "")
            for key, value, spread, rounds in _LINE.findall(lines)
        }
    return found


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def short(number: float) -> str:
    """A number as people read it: three digits that count, two below one.

    >>> short(6672.0), short(423800.0), short(1.156), short(12.65), short(0.3988), short(48.32)
    ('6,670', '424,000', '1.16', '12.7', '0.40', '48.3')
    """
    if number == 0:
        return "0"
    if abs(number) < 10:
        return f"{number:.2f}"
    return f"{float(f'{number:.3g}'):,.{1 if abs(number) < 100 else 0}f}"


def render(tables: Sequence[Table], found: Results) -> str:
    """One table in Markdown.

    :raises KeyError: for a figure that RESULTS.md lacks.
    """
    peers = any(row.beside for table in tables for row in table.rows)
    lines = ["| | ctxflow | peer | ratio |", "|---|---:|---:|---:|"] if peers else ["| | |", "|---|---:|"]
    for table in tables:
        figures = found[table.section]
        for row in table.rows:
            lines += _lines(row, figures, peers)
    return "\n".join(lines) + "\n"


def _lines(row: Row, figures: Mapping[str, Cell], peers: bool) -> list[str]:
    """A row and its peers."""
    first, *others = (figures[name] for name in row.figures)
    text = short(first[0]) + row.unit + first[1]
    if others:
        text = ", ".join(short(value) for value, _ in (first, *others)) + row.unit
    if not peers:
        return [f"| {row.words} | {text} |"]
    cells = [_beside(peer, figures, row.unit) for peer in row.beside] or ["| | |"]
    return [f"| {row.words} | {text} {cells[0]}", *(f"| | {cell}" for cell in cells[1:])]


def _beside(peer: Beside, figures: Mapping[str, Cell], unit: str) -> str:
    value, spread = figures[peer.figure]
    ratio = ""
    if peer.ratio:
        times, width = figures[peer.ratio]
        ratio = f" {short(times)}{width}"
    return f"| {peer.words} {short(value)}{unit}{spread} |{ratio} |"


def written(document: str, found: Results) -> str:
    """A document with its tables as the results are."""
    return _PLACE.sub(lambda place: place[1] + render(TABLES[place[2]], found) + place[3], document)


def main(words: Sequence[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description="Write the documents' tables of figures from RESULTS.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, say which documents are not up to date")
    given = parser.parse_args(words)
    found = results((FOLDER / "RESULTS.md").read_text())
    stale = 0
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()
        if (new := written(text, found)) == text:
            continue
        if given.check:
            stale += 1
            print(
                f"{name}: its figures are not those of benchmarks/RESULTS.md: run benchmarks/tables.py", file=sys.stderr
            )
        else:
            path.write_text(new)
            print(f"written: {name}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
