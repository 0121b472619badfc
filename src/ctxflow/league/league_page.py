"""A league as data and as one page of HTML that needs nothing else: no network, no other file, no script."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.installing import __version__
from ctxflow.league.contests import Contest, LeagueWorkload
from ctxflow.league.ranking import Interval, LeagueStanding, standings
from ctxflow.league.tournament import Entrant, GameResult, ratios_of
from ctxflow.observe.measures import even, figure
from ctxflow.observe.page import page_environment
from ctxflow.policies.registry import DEFAULTS
from ctxflow.simulator.experiments import machine, versions

FORMAT = "ctxflow-league/1"


@dataclasses.dataclass(frozen=True)
class League:
    """What a league came to.

    :ivar workloads: the workloads that were played. :ivar planned: how many games there were to be.
    :ivar interrupted: whether it was ended before all were played; what counts are the games that all have played.
    """

    contest: Contest
    workloads: Sequence[LeagueWorkload]
    players: Sequence[Entrant]
    seeds: Sequence[int]
    results: Sequence[GameResult]
    planned: int
    interrupted: bool = False
    command: str = ""

    def standings(self) -> list[LeagueStanding]:
        """Return the policies, best first; a ValueError if no game was played by all."""
        return standings(*ratios_of(self.results))

    def beside(self, policy: str, workload: str) -> dict[str, float]:
        """Return the median of each figure that is measured beside, over a policy's games on a workload."""
        games = ((each.game, each.outcome) for each in self.results)
        those = [o.beside for game, o in games if o and (game.entrant.name, game.workload) == (policy, workload)]
        return {name: statistics.median(each[name] for each in those) for name in self.contest.beside if those}

    def conclusion(self) -> str:
        """Return who is first, and where the default stands, in a sentence or two."""
        found = self.standings()
        first = [each for each in found if each.rank == 1 and not each.failure]
        if not first:
            return "No policy played to the end."
        names = " and ".join(each.policy for each in first)
        text = f"{names} {'is' if len(first) == 1 else 'are tied as'} first"
        default = next((each for each in found if each.policy == DEFAULTS[self.contest.family]), None)
        if default is None:
            return f"{text}."
        if default.failure:
            return f"{text}. The default, {default.policy}, did not play to the end."
        if default.rank == 1:
            return f"{text}; {default.policy} is the default."
        behind = default.behind
        assert behind is not None
        return f"{text}. The default, {default.policy}, takes {times(behind)} times as much as {found[0].policy}."


def times(interval: Interval) -> str:
    """Return a ratio with its interval.

    >>> times(Interval(1.234, 1.1, 1.35))
    '1.23 [1.10, 1.35]'
    """
    value, low, high = even([interval.value, interval.low, interval.high])
    return f"{value} [{low}, {high}]"


def place(standing: LeagueStanding, all_standings: Sequence[LeagueStanding]) -> str:
    """Return a place in words: "2" or, tied, "1=", and "-" for who did not play to the end."""
    if standing.failure:
        return "-"
    tied = sum(each.rank == standing.rank and not each.failure for each in all_standings) > 1
    return f"{standing.rank}{'=' if tied else ''}"


def as_data(league: League) -> dict[str, Any]:
    """Return all of a league for JSON."""
    contest = league.contest
    return {
        "format": FORMAT,
        "family": contest.family,
        "measure": contest.measure,
        "unit": contest.unit,
        "default": DEFAULTS[contest.family],
        "seeds": list(league.seeds),
        "workloads": [{"name": each.name, "about": each.about} for each in league.workloads],
        "interrupted": league.interrupted,
        "games": [_game(each) for each in league.results],
        "games_planned": league.planned,
        "processor_seconds": round(sum(each.seconds for each in league.results), 1),
        "standings": [
            {
                **dataclasses.asdict(each),
                "beside": {w.name: league.beside(each.policy, w.name) for w in league.workloads},
            }
            for each in league.standings()
        ],
        "conclusion": league.conclusion(),
        "machine": machine(),
        "versions": versions(("numpy", "scipy", "POT")),
    }


def _game(result: GameResult) -> dict[str, Any]:
    game, outcome = result.game, result.outcome
    found = {"policy": game.entrant.name, "workload": game.workload, "seed": game.seed}
    if outcome is None:
        return {**found, "failure": result.failure}
    return {**found, "score": outcome.score, "bound": outcome.bound, **outcome.beside}


def league_page(league: League) -> str:
    """Return the page; a CtxflowError if jinja2 is not installed."""
    found = league.standings()
    playing = [each for each in found if each.ratio is not None]
    most = max((each.ratio.high for each in playing if each.ratio), default=1.0)
    least = min((each.ratio.low for each in playing if each.ratio), default=1.0)
    scale = _Scale(min(1.0, least), max(most, 1.1))
    names = [each.policy for each in playing]
    return (
        page_environment(_resource)
        .get_template("league.html")
        .render(
            family=league.contest.family,
            measure=league.contest.measure,
            unit=league.contest.unit,
            conclusion=league.conclusion(),
            remark=remark(league),
            command=league.command,
            default=DEFAULTS[league.contest.family],
            rows=[_row(each, found, scale) for each in found],
            ticks=scale.ticks(),
            names=names,
            workloads=[(each.name, each.about, _cells(each.name, playing)) for each in league.workloads],
            beside_heads=[name.replace("_", " ") for name in league.contest.beside],
            beside=[
                (each.name, [(name, [figure(v) for v in league.beside(name, each.name).values()]) for name in names])
                for each in league.workloads
            ],
            failures=[(each.policy, each.failure) for each in found if each.failure],
            version=__version__,
            css=importlib.resources.files("ctxflow.observe").joinpath("page.css").read_text(encoding="utf-8"),
        )
    )


def _resource(name: str) -> str:
    return importlib.resources.files("ctxflow.league").joinpath(name).read_text(encoding="utf-8")


def remark(league: League) -> str:
    """Return how much was played, in a sentence or two."""
    seeds = counted(len(league.seeds), "seed")
    played = (
        f"{len(league.results):,} of {league.planned:,} games" if league.interrupted else f"{league.planned:,} games"
    )
    text = f"{played}: {counted(len(league.players), 'policy', 'policies')} on "
    text += f"{counted(len(league.workloads), 'workload')}, {seeds}."
    if league.interrupted:
        text += " It was interrupted: only games that all policies have played count."
    if len(league.seeds) == 1:
        text += " With one seed, intervals are of what differs between workloads."
    return text


class _Scale:
    """A logarithmic axis from one ratio to another, in percent of its width."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._span = math.log(low), max(1e-9, math.log(high) - math.log(low))

    def at(self, ratio: float) -> float:
        return 100 * (math.log(ratio) - self._low) / self._span

    def ticks(self) -> list[tuple[float, str]]:
        """Return where round ratios are, at most seven of them."""
        steps = [m * 10**e for e in range(4) for m in (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)]
        there = [each for each in steps if -0.01 <= self.at(each) <= 100.01]
        while len(there) > 7:
            there = there[::2]
        return [(self.at(each), f"{each:g}") for each in there]


def _row(each: LeagueStanding, found: Sequence[LeagueStanding], scale: _Scale) -> Mapping[str, Any]:
    row = {"place": place(each, found), "policy": each.policy, "failure": each.failure}
    if each.ratio is None or each.behind is None:
        return row
    low, value, high = (scale.at(ratio) for ratio in (each.ratio.low, each.ratio.value, each.ratio.high))
    first, last = each.ranks
    return row | {
        "ratio": times(each.ratio),
        "behind": times(each.behind) if each.behind.high > 1.0 or each.behind.low < 1.0 else "1",
        "ranks": f"{first}" if first == last else f"{first} to {last}",
        "low": low,
        "width": high - low,
        "value": value,
    }


def _cells(workload: str, playing: Sequence[LeagueStanding]) -> list[tuple[str, str]]:
    """Return each policy's ratio on a workload, and how it is shown: the best, and what reads as the best, as such."""
    values = [each.workloads.get(workload) for each in playing]
    best = figure(min((value for value in values if value is not None), default=None))
    return [(text, "best" if text == best else "") for text in map(figure, values)]
