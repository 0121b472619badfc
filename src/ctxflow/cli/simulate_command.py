"""`ctxflow simulate`: what would come of a site and a workload, or of a recorded run with something changed."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxflow.cli.screen import AsJson, Seed, SiteOrRun, Workload, may_draw, share_bar
from ctxflow.errors import counted
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.simulator.recorded_run import Recorded
    from ctxflow.simulator.scenario import Change, Scenario
    from ctxflow.simulator.studies import Case, Summary

AS_IT_WAS = "as it was"
Changes = Sequence["Change"]


def simulate(
    what: SiteOrRun,
    workload: Workload = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be given again.")
    ] = None,
    sweeps: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="KEY=A,B,C", help="Simulate each value; may be given again.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(metavar="8,16,64", help="Simulate each window of items in flight, as batching=fixed has it."),
    ] = None,
    seed: Seed = 0,
    runs: Annotated[int, typer.Option(min=1, help="Simulate with so many seeds: medians and spreads.")] = 1,
    hours: Annotated[float, typer.Option("--until", min=0.001, help="Give up after so many virtual hours.")] = 168.0,
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option(help="Folder for event logs and pictures.")] = None,
) -> None:
    """Predict a run in virtual time, before GPU time is spent on it.

    The scheduler and policies of live runs, in virtual time: makespan,
    items/s, how close to the fluid bound of any schedule (workers never
    idle; nothing is staged, loaded or lost), the cost of evictions, context
    loads, bytes moved.

    \b
    Given a site and a workload (docs/workloads.md lists its keys; this is one):
      [\\[apps]]
      items = 150_000
      item_seconds = 0.3          # or {a10 = 0.27, titan-x = 0.38}
      [\\[contexts]]
      load_seconds = 15

    \b
    Given a run's directory, its parameters are measured from its event
    log (seconds of items, calls, loads; when workers joined and left), and it
    is simulated as it was and with the changes, and compared with the record.

    \b
    Keys of the site, and after "workload." those of the workload; a list's
    entry goes by its name; 2x is twice what it was; KEY= is the default.
      --set batching=opportunistic --set tiers.a10.workers=40
      --set workload.evictions.per_hour=6
      --set workload.zygote=worker --set workload.cache=true
      --sweep batching.size=10,100,1000

    \b
    ctxflow simulate site.toml workload.toml --sweep batching=fixed,opportunistic
    ctxflow simulate runs/20261121-054135-17 --set workers=2x
    ctxflow simulate runs/20261121-054135-17 --windows 16,32,64,128
    ctxflow simulate site.toml workload.toml --output sim && ctxflow report sim
    """
    from ctxflow.simulator.scenario import combinations, parse_change, parse_sweep
    from ctxflow.simulator.studies import study

    common = [parse_change(text) for text in changes or ()]
    swept = combinations([parse_sweep(text) for text in [*(sweeps or ()), *_of_windows(windows)]])
    recorded = recorded_of(what, workload)
    scenario = functools.partial(scenario_of, what, workload, recorded)
    cases = list(_cases(scenario, recorded is not None, common, swept, output))
    with share_bar("Simulating") as tell:
        summaries = study(cases, range(seed, seed + runs), hours * 3600, tell)
    pictures = [path for case in cases if case.log for path in _draw(case.log)]
    if as_json:
        data: dict[str, Any] = {"seed": seed, "runs": runs, "cases": [as_data(each) for each in summaries]}
        if recorded is not None:
            figures = {name: getattr(recorded, name) for name in _RECORDED}
            data |= {"recorded": {**figures, "workload": recorded.workload_values()}, "doubts": recorded.doubts}
        print(json.dumps(data))
    else:
        show(summaries, recorded)
        if pictures:
            print("\nPictures", *(f"  {path}" for path in pictures), sep="\n")
    if not all(summary.finished for summary in summaries):
        raise typer.Exit(1)


def _of_windows(windows: str | None) -> Iterator[str]:
    """Yield the sweep that windows mean: `batching.window` of the policy `fixed`."""
    if windows is None:
        return
    numbers = [part.strip() for part in windows.split(",")]
    if not all(number.isdigit() and int(number) for number in numbers):
        raise typer.BadParameter(f"--windows {windows}: give numbers of items in flight, such as 8,16,64")
    yield "batching=" + ",".join(f"{{policy='fixed', window={number}}}" for number in numbers)


def recorded_of(what: str, workload: Path | None) -> Recorded | None:
    """Return the recorded run that is meant, None where a site and a workload are given."""
    from ctxflow.simulator.scenario import read_recorded

    if workload is not None:
        return None
    if not Path(what).is_dir():
        raise typer.BadParameter(f"give a workload file too, or the directory of a recorded run: {what} is neither")
    return read_recorded(Path(what))


def scenario_of(what: str, workload: Path | None, recorded: Recorded | None, changes: Changes) -> Scenario:
    """Return the scenario of a recorded run, or of a site and a workload, with changes."""
    from ctxflow.simulator.scenario import load_scenario, recorded_scenario

    if recorded is not None:
        return recorded_scenario(recorded, changes)
    assert workload is not None
    return load_scenario(what, workload, changes)


def _cases(
    scenario: Callable[[Changes], Scenario], recorded: bool, common: Changes, swept: Sequence[Changes], to: Path | None
) -> Iterator[Case]:
    """Yield the scenarios to simulate, with their names and places."""
    from ctxflow.simulator.studies import Case

    wanted: list[tuple[str, Changes]] = [
        (", ".join(change.text for change in each) or ", ".join(c.text for c in common) or "simulated", each)
        for each in swept
    ]
    if recorded:
        wanted = [each for each in wanted if each[1] or common]
        yield Case(AS_IT_WAS, scenario([]), _place(to, AS_IT_WAS, bool(wanted)))
    for name, each in wanted:
        yield Case(name, scenario([*common, *each]), _place(to, name, recorded or len(wanted) > 1))


def _place(output: Path | None, name: str, several: bool) -> Path | None:
    if output is None or not several:
        return output
    return output / (re.sub(r"[^\w.=-]+", "-", name).strip("-") or "case")


def _draw(directory: Path) -> list[Path]:
    """Draw the pictures of a simulated run, from its event log."""
    from ctxflow.observe.run_report import read_report
    from ctxflow.simulator.studies import LOG

    if not may_draw():
        return []
    from ctxflow.observe.plots import draw

    found = read_report(directory)
    return [directory / LOG, *draw(directory, found.history, found.transfers, found.trees)]


_RECORDED = ("name", "seconds", "items", "done", "evicted", "joined", "loads", "batches", "lost_items")
_DERIVED = ("items_per_second", "tokens_per_second", "efficiency")


def as_data(summary: Summary) -> dict[str, Any]:
    """Return a case for JSON: the median of each figure and its spread, and every run. Seconds, bytes."""
    from ctxflow.simulator.studies import Result

    names = [f.name for f in dataclasses.fields(Result) if f.name not in ("moved", "finished")] + list(_DERIVED)
    runs = [
        {**dataclasses.asdict(each), **{name: getattr(each, name) for name in _DERIVED}} for each in summary.results
    ]
    return {
        "case": summary.case.name,
        "finished": summary.finished,
        "median": {name: summary.median(name) for name in names},
        "spread": {name: summary.spread(name) for name in names},
        "moved": summary.moved,
        "runs": runs,
    }


def show(summaries: Sequence[Summary], recorded: Recorded | None) -> None:
    """Print one case as a list of figures, several as a table; and below what is to be known of them."""
    from ctxflow.observe.measures import seconds

    console = visible_console()
    if len(summaries) == 1 and recorded is None:
        print(one(summaries[0]))
    else:
        if recorded is not None:
            print(f"Run {recorded.name}\n")
        print(table(summaries, recorded, console.width))
    for summary in summaries:
        if not summary.finished:
            left = max(result.items - result.done for result in summary.results)
            when = seconds(summary.median("seconds"))
            print(
                f"{summary.case.name}: {counted(left, 'item')} left after {when}: see --until, and whether batches fit"
            )
    if recorded is not None:
        for doubt in recorded.doubts:
            print(f"Note: {doubt}.")


def one(summary: Summary) -> str:
    """Return the figures of one case, a line each."""
    from ctxflow.observe.measures import seconds

    median = summary.median
    several = len(summary.results) > 1
    around = f" (spread {seconds(summary.spread('seconds'))} over {len(summary.results)} runs)" if several else ""
    moved = ", ".join(f"{size / 1e9:,.4g} GB from {source}" for source, size in summary.moved.items()) or "nothing"
    joined = f"{median('workers'):,.1f} on average, {median('joined'):,.0f} joined, {median('evicted'):,.0f} evicted"
    twice = f"; {median('wasted_items'):,.0f} answered a second time by duplicates" if median("duplicates") else ""
    batches = counted(round(median("batches")), "batch", "batches")
    rate = median("tokens_per_second")
    tokens = [("Tokens", f"{median('tokens'):,.0f}, {rate:,.4g} a second")] if rate else []
    lines = [
        ("Makespan", f"{seconds(median('seconds'))}, {median('items_per_second'):,.4g} items/s{around}"),
        *tokens,
        ("Bound", f"{seconds(median('fluid_seconds'))}: {median('efficiency'):.1%} of what nobody beats"),
        ("Items", f"{median('done'):,.0f} of {median('items'):,.0f} done in {batches}"),
        ("Workers", joined),
        ("Lost", f"{counted(round(median('lost_items')), 'item')} in {seconds(median('lost_seconds'))} of work{twice}"),
        ("Contexts", f"{counted(round(median('loads')), 'load')} in {seconds(median('load_seconds'))}"),
        ("Moved", f"{moved}; staging took {seconds(median('stage_seconds'))} of the workers' time"),
    ]
    if median("raised") or median("dead"):
        failed = counted(round(median("raised")), "call or build", "calls and builds")
        lines.insert(5, ("Failed", f"{failed}; {counted(round(median('dead')), 'item')} given up"))
    return "\n".join(f"{name:9} {text}" for name, text in lines)


def _add_tokens(
    head: list[str], rows: list[list[str]], summaries: Sequence[Summary], recorded: Recorded | None
) -> None:
    """Add columns for apps whose calls overlap: tokens a second, and the share of the engines' work that was lost."""
    if not any(summary.median("tokens") for summary in summaries):
        return
    at = head.index("items/s") + 1
    head[at:at] = ["tokens/s", "lost work"]
    for cells, summary in zip(rows[-len(summaries) :], summaries, strict=True):
        lost = summary.median("lost_seconds")
        work = lost + summary.median("call_seconds")
        cells[at:at] = [f"{summary.median('tokens_per_second'):,.4g}", f"{lost / work if work else 0.0:.1%}"]
    if recorded is not None:
        rate = recorded.tokens / recorded.seconds if recorded.seconds else 0.0
        rows[0][at:at] = [f"{rate:,.4g}" if rate else "", ""]


def table(summaries: Sequence[Summary], recorded: Recorded | None, width: int) -> str:
    """Return a row a case; ratios are to the first row. A name that is too long for the width has its own line."""
    from ctxflow.observe import measures

    seconds = measures.seconds
    head = ["", "makespan", "ratio", "items/s", "bound", "evicted", "lost", "loads"]
    rows: list[list[str]] = []
    first = summaries[0].median("seconds")
    if recorded is not None:
        first = recorded.seconds
        rate = recorded.done / first if first else 0.0
        counts = [f"{count:,}" for count in (recorded.evicted, recorded.lost_items, recorded.loads)]
        rows.append(["recorded", seconds(first), "1", f"{rate:,.4g}", "", *counts])
    for summary in summaries:
        took = seconds(summary.median("seconds"))
        cells = [summary.case.name, took if summary.finished else f"> {took}"]
        cells.append(f"{summary.median('seconds') / first:.3g}" if first else "")
        cells += [f"{summary.median('items_per_second'):,.4g}", f"{summary.median('efficiency'):.1%}"]
        cells += [f"{summary.median(name):,.0f}" for name in ("evicted", "lost_items", "loads")]
        rows.append(cells)
    if len(summaries[0].results) > 1:
        head.insert(2, "spread")
        spreads = [*([""] if recorded is not None else []), *(seconds(each.spread("seconds")) for each in summaries)]
        for cells, spread in zip(rows, spreads, strict=True):
            cells.insert(2, spread)
    if any(summary.moved for summary in summaries):
        head.append("GB moved")
        for cells, summary in zip(rows[-len(summaries) :], summaries, strict=True):
            cells.append(f"{sum(summary.moved.values()) / 1e9:,.4g}")
        if recorded is not None:
            rows[0].append("")
    _add_tokens(head, rows, summaries, recorded)
    for name in ("evicted", "lost"):
        column = head.index(name)
        if all(cells[column] == "0" for cells in rows):
            for cells in (head, *rows):
                del cells[column]
    room = width - sum(max(map(len, column)) + 2 for column in list(zip(head, *rows, strict=True))[1:])
    lines: list[list[str]] = []
    for name, *figures in rows:
        lines += [[name], ["", *figures]] if len(name) > room else [[name, *figures]]
    return measures.table(head, lines)
