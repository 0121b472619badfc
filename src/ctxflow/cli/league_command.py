"""`ctxflow league`: every policy of a family on the same public workloads, against bounds, ranked."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctxflow.cli.screen import AsJson, Seed, say, share_bar
from ctxflow.errors import UsageError
from ctxflow.files import written_whole
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.league.contests import Contest, LeagueWorkload
    from ctxflow.league.league_page import League
    from ctxflow.league.tournament import Game, GameResult

_SEEDS, _QUICK_SEEDS = 32, 2
FAMILIES = ("routing", "batching", "placement", "preemption", "scaling", "health", "sessions")
"""The registry's, which a help text need not import."""


def _families(incomplete: str) -> list[str]:
    return [family for family in FAMILIES if family.startswith(incomplete)]


def _policies(ctx: typer.Context, incomplete: str) -> list[str]:
    from ctxflow.policies.registry import names

    family = ctx.params.get("family")
    return _completed(incomplete, names(family) if family in FAMILIES else [])


def _workloads(ctx: typer.Context, incomplete: str) -> list[str]:
    from ctxflow.league.contests import contests

    family = ctx.params.get("family")
    return _completed(
        incomplete, [workload.name for each in contests() if each.family == family for workload in each.workloads]
    )


def _completed(incomplete: str, known: Iterable[str]) -> list[str]:
    """Return how the last word of a list separated by commas may go on."""
    before, comma, last = incomplete.rpartition(",")
    said = before.split(",")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in said]


def league(
    family: Annotated[
        str,
        typer.Option("--family", "-f", help=f"One of: {', '.join(FAMILIES)}.", autocompletion=_families),
    ],
    policies: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Who plays; by default all that are installed.", autocompletion=_policies),
    ] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="On what; by default all.", autocompletion=_workloads)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"How many seeds; {_SEEDS} by default, {_QUICK_SEEDS} with --quick.")
    ] = None,
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few seeds: a minute or two.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the page (HTML) and the data (JSON).")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the policies of a family on public workloads, against bounds.

    Each policy that is installed, another package's among them, decides in
    the scheduler of live runs on the simulated engine, on the same draws of
    the same workloads: spot markets, Azure's requests, days of a campus,
    flash crowds (docs/league.md). Ranks have 95 % intervals; policies that
    cannot be told apart are tied. One that raises, or is not done within a
    game's limits, is last, with the reason.

    Ctrl-C ends it and ranks by the games that all policies have played.
    Exit status: 0; 1 if a policy did not play to the end; 130 interrupted.

    \b
    ctxflow league --family routing --output league
    ctxflow league -f routing --policies context-affinity,./mine.py:Nearest
    ctxflow league -f batching --policies "fixed,{policy='fixed', size=10}"
    """
    from ctxflow.league.contests import contest_of
    from ctxflow.league.league_page import League
    from ctxflow.league.tournament import entrants, games_of
    from ctxflow.observe.page import page_environment

    contest = contest_of(family)
    played_on = _workloads_of(contest, workloads)
    players = entrants(family, policies)
    if output is not None:
        if output.exists() and not output.is_dir():
            raise UsageError(f"{output} is a file: give a folder")
        page_environment(str)  # What it lacks is said before the games, not after them.
    count = seeds if seeds is not None else _QUICK_SEEDS if quick else _SEEDS
    drawn = range(seed, seed + count)
    games = games_of(contest, players, [each.name for each in played_on], drawn)
    results, interrupted = _played(games)
    command = shlex.join(["ctxflow", *sys.argv[1:]])
    found = League(contest, played_on, players, drawn, results, len(games), interrupted, command)
    if not interrupted or _has_round(found):
        _tell(found, output, as_json)
    if interrupted:
        say("interrupted")
        raise typer.Exit(130)
    if any(each.failure for each in results):
        raise typer.Exit(1)


def _workloads_of(contest: Contest, text: str | None) -> Sequence[LeagueWorkload]:
    if text is None:
        return contest.workloads
    wanted = list(dict.fromkeys(name.strip() for name in text.split(",")))
    return [contest.workload(name) for name in wanted]


def _played(games: Sequence[Game]) -> tuple[list[GameResult], bool]:
    """Play, and return the results and whether Ctrl-C ended it."""
    from ctxflow.league.tournament import play_all

    results: list[GameResult] = []
    with share_bar("Playing") as tell:
        playing = play_all(games)
        try:
            for result in playing:
                results.append(result)
                tell(len(results) / len(games))  # Less than all of it where a policy plays no more.
        except KeyboardInterrupt:
            return results, True
        finally:
            playing.close()
    return results, False


def _has_round(found: League) -> bool:
    try:
        found.standings()
    except ValueError:
        return False
    return bool(found.results)


def _tell(found: League, output: Path | None, as_json: bool) -> None:
    from ctxflow.league.league_page import as_data, league_page

    written = []
    # Rendered once for both: the machine's load, which it includes, changes.
    data = json.dumps(as_data(found)) if as_json or output is not None else ""
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        family = found.contest.family
        for name, text in ((f"{family}.html", league_page(found)), (f"{family}.json", data)):
            with written_whole(output / name) as file:
                file.write(text.encode())
            written.append(output / name)
    if as_json:
        print(data)
        return
    _show(found)
    if written:
        print("\nWritten", *(f"  {path}" for path in written), sep="\n")


def _show(found: League) -> None:
    from ctxflow.league.league_page import place, remark, times
    from ctxflow.observe.measures import table
    from ctxflow.policies.registry import DEFAULTS

    standings, default = found.standings(), DEFAULTS[found.contest.family]
    console = visible_console()
    print(remark(found), "\n")
    rows = []
    for number, each in enumerate(standings):
        name = f"{place(each, standings):>3} {each.policy}{' (default)' if each.policy == default else ''}"
        if each.ratio is None or each.behind is None:
            rows.append([name, "-", "-"])
        else:
            rows.append([name, times(each.ratio), times(each.behind) if number else "1"])
    print(table(["    policy", "over the bound", "over the best"], rows))
    if any(each.ratio is not None for each in standings):
        print(f"\n{_by_workload(found, console.width)}")
    for each in standings:
        if each.failure:
            print(f"\n{each.policy} did not play to the end: {each.failure}.")
    console.print(f"\n{found.conclusion()}", highlight=False, markup=False)
    console.print(f"Measured, less is better: {found.contest.measure}.", highlight=False, markup=False, style="dim")


def _by_workload(found: League, width: int) -> str:
    """Return each policy's ratios, a column each as far as the width allows, or else a row each."""
    from ctxflow.observe.measures import figure, table

    playing = [each for each in found.standings() if each.ratio is not None]
    names = [each.name for each in found.workloads]
    figures = [[figure(each.workloads.get(name)) for each in playing] for name in names]
    wide = table(
        ["over the bound", *(each.policy for each in playing)],
        [[name, *cells] for name, cells in zip(names, figures, strict=True)],
    )
    if max(map(len, wide.splitlines())) <= width:
        return wide
    turned = [[each.policy, *cells] for each, cells in zip(playing, zip(*figures, strict=True), strict=True)]
    return table(["over the bound", *names], turned)
