"""A league in words, as data and as a page: what is said of who is first, and what strangers' names must not do."""

import json
from html.parser import HTMLParser

import pytest

from ctxflow.league.contests import contest_of
from ctxflow.league.games import GameOutcome
from ctxflow.league.league_page import League, as_data, league_page, place, remark
from ctxflow.league.tournament import Entrant, Game, GameResult

CONTEST = contest_of("sessions")
BESIDE = dict.fromkeys(CONTEST.beside, 2.0)
DEFAULT = "least-loaded"


def league(scores, seeds=range(4), interrupted=False, workloads=2):
    """A league of policies with these scores on each seed; a text is why it failed."""
    played = CONTEST.workloads[:workloads]
    results = []
    for seed in seeds:
        for workload in played:
            for name, score in scores.items():
                game = Game(Entrant(name, name), "sessions", workload.name, seed)
                failure = score if isinstance(score, str) else ""
                wobble = 1 + 0.01 * ((7 * seed * len(name) + len(workload.name)) % 5)
                outcome = None if failure else GameOutcome(score * wobble, 1.0, BESIDE)
                results.append(GameResult(game, outcome, failure, 0.5))
    entrants = [Entrant(name, name) for name in scores]
    planned = len(results) + 10 * interrupted
    return League(CONTEST, played, entrants, list(seeds), results, planned, interrupted, "ctxflow league")


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ({DEFAULT: 1.0, "b": 2.0}, f"{DEFAULT} is first; {DEFAULT} is the default."),
        ({DEFAULT: 1.5, "bb": 1.5}, f"bb and {DEFAULT} are tied as first; {DEFAULT} is the default."),
        ({DEFAULT: "it died", "b": 2.0}, f"b is first. The default, {DEFAULT}, did not play to the end."),
        ({"a": 1.0, "b": 2.0}, "a is first."),
        ({DEFAULT: "it died"}, "No policy played to the end."),
    ],
)
def test_the_conclusion_says_who_is_first_and_where_the_default_stands(scores, says):
    assert league(scores).conclusion() == says
    assert as_data(league(scores))["conclusion"] == says


def test_a_default_that_is_not_first_is_said_by_how_much():
    text = league({DEFAULT: 3.0, "b": 1.0}).conclusion()
    assert text.startswith(f"b is first. The default, {DEFAULT}, takes 3.0")
    assert text.endswith("] times as much as b.")


def test_places_and_how_much_was_played():
    found = league({"a": 1.0, "d": 1.0, "b": 5.0, "c": "it died"}, interrupted=True, seeds=[3])
    standings = found.standings()
    assert [place(each, standings) for each in standings] == ["1=", "1=", "3", "-"]
    assert remark(found).startswith("8 of 18 games: 4 policies on 2 workloads, 1 seed. It was interrupted")
    assert "intervals are of what differs between workloads" in remark(found)


def test_the_data_have_all_games_and_can_be_read_again():
    found = league({DEFAULT: 1.0, "b": "it raised"})
    data = json.loads(json.dumps(as_data(found)))
    assert next(game for game in data["games"] if game["policy"] == "b")["failure"] == "it raised"
    assert {game["score"] >= game["bound"] for game in data["games"] if "score" in game} == {True}
    assert data["standings"][0]["beside"][CONTEST.workloads[0].name] == BESIDE
    assert data["processor_seconds"] == 8.0 and data["seeds"] == [0, 1, 2, 3]


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attributes)

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_else_and_strangers_names_are_text():
    evil = "<script>alert(1)</script>"
    reader = Reader()
    reader.feed(league_page(league({DEFAULT: 1.0, evil: 2.0, "c": f"it raised {evil}"})))
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert reader.text.count(evil) == 5  # Standings, the reason, workloads, and beside twice.
    for words in ("League of sessions policies", "default", "did not play to the end", CONTEST.measure):
        assert words in reader.text
    for workload in CONTEST.workloads[:2]:
        assert workload.about in reader.text
