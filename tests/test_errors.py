"""One of something is not several, and an object is not a object, wherever messages count and name."""

import re

import pytest

from ctxflow import batch_app
from ctxflow.batch.driver import Outcome, summary
from ctxflow.batch.job_status import describe
from ctxflow.batch.pump import Tolerance
from ctxflow.cli.factory_commands import _report
from ctxflow.executors.bare import cancelled_text
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.factory.tier_providers import Leftovers
from ctxflow.host.call_results import _pairs
from ctxflow.models.reading import check_texts
from ctxflow.models.results import InputTooLong, per_row
from ctxflow.observe.progress import Progress
from ctxflow.rows.readers import open_source, open_table
from ctxflow.scheduler.context_moves import refused
from ctxflow.scheduler.events import ContextSpec, TierSpec

EACH_ONE = Outcome(1, 1, 1, 1, 1.0, nulled={"a": 1}, altered={"a": 1}, truncated_now=1, limited_now=1)


class Items(dict):
    """A dict of another name."""


def one(items):
    return items


def a_short_row(folder):
    (folder / "in.csv").write_text("a,b\n1\n")
    return str(next(open_source(folder / "in.csv")[1].chunks())[0].values)


def too_many_failed():
    tolerance = Tolerance("0")
    tolerance.dead(0, "ValueError", "bad")
    return tolerance.exceeded()


def left_over(capsys, folder):
    _report(Leftovers([], ["a"], 1, []), True, True, [])
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "told",
    [
        lambda: summary(EACH_ONE, "out.csv"),
        lambda: describe(Progress(done=1, dead=1, workers=1, evictions=1, sessions={"running": 1})),
        lambda: cancelled_text(1, "the program ended"),
        lambda: batch_app(one).check_width(2),
        lambda: _pairs([1, 2], 1, one),
        lambda: _pairs([1], 2, one),
        lambda: per_row(1, seed=[1, 2]),
        lambda: per_row(2, seed=[1]),
        lambda: per_row(1, seed=object()),
        lambda: str(InputTooLong("the prompt", 1, 0, "no room")),
        lambda: check_texts([0]),
        lambda: refused(ContextSpec("c", "llama", gpus=1), [TierSpec("cpu")], False),
        lambda: refused(ContextSpec("c", "llama", gpus=3), [TierSpec("t", gpus=1)], False),
        lambda: EmbeddedEngine(workers=1, gpus_per_worker=1000),
        lambda: batch_app(object()),
        lambda: batch_app(one).map(Items(a=[1])),
        lambda: open_table(type("Arrays", (dict,), {"column_names": ()})()),
        too_many_failed,
    ],
)
def test_one_is_one(told):
    says_it_of_one(told)


def says_it_of_one(told):
    try:
        text = told()
    except (TypeError, ValueError) as error:
        text = str(error)
    assert text and not re.search(r"\b1 (more )?\w*[^\Ws]s\b|\ba [aeio]\w+|\(s\)", text), text


def test_a_row_and_what_is_left_over(tmp_path, capsys):
    says_it_of_one(lambda: a_short_row(tmp_path))
    says_it_of_one(lambda: left_over(capsys, tmp_path))
