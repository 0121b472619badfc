"""Where the time of loads went: what the driver knows and what library processes tell, together."""

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from played_run import Played
from test_page import EVIL, Parsed

import forked
from ctxflow import ContextExecutor, batch_app, context, load_part
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.load_times import LoadTimes, LoadTimesReader, load_rows, load_table, load_times_data
from ctxflow.observe.page import page
from ctxflow.observe.run_report import Report, as_data, as_text
from ctxflow.observe.summary import summarise
from ctxflow.observe.transfers import Transfers
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line, read
from waiting import patience

SECONDS = st.floats(0, 100)
TOLD = st.dictionaries(
    st.sampled_from(["files", "process", "imports", "weights", "index", "build"]), SECONDS, min_size=1
)


def taken(*steps):
    """What the reader finds in events with their commands, as they are in a log."""
    reader = LoadTimesReader()
    found = []
    for event, *commands in steps:
        record = json.loads(line(event, commands))
        parts = reader.take(record["event"], record["commands"])
        if parts is not None:
            found.append(parts)
    return found


@given(SECONDS, SECONDS, SECONDS, TOLD, st.booleans())
def test_parts_are_a_whole_load_from_its_first_command_until_it_is_ready(begins, staging, on_way, told, stages):
    loads = begins + staging if stages else begins
    ready = loads + on_way + sum(told.values())
    steps = [(ev.Tick(begins), cmd.Stage("w", "c") if stages else cmd.Load("w", "c"))]
    if stages:
        steps.append((ev.ContextStaged(loads, "w", "c"), cmd.Load("w", "c")))
    steps.append((ev.ContextReady(ready, "w", "c", sum(told.values()), parts=told),))
    [parts] = taken(*steps)
    assert sum(parts.values()) == pytest.approx(ready - begins, abs=1e-6)
    assert min(parts.values()) >= 0
    assert parts["files"] == pytest.approx(told.get("files", 0.0) + loads - begins)
    assert parts["sending"] == pytest.approx(on_way, abs=1e-6)


def test_loads_that_nobody_told_of_that_failed_or_were_dropped_have_no_parts():
    def load(at):
        return ev.Tick(at), cmd.Load("w", "c")

    told = {"build": 1.0}
    lost = ev.ContextReady(9.0, "w", "c", 1.0, parts=told)
    failed = ev.ContextFailed(1.0, "w", "c", ev.Failure("exception", "E", "e"))
    assert taken(load(0.0), (ev.ContextReady(1.0, "w", "c", 1.0),)) == []
    assert taken(load(0.0), (failed,), (lost,)) == []
    assert taken(load(0.0), (ev.WorkerLost(1.0, "w"),), (lost,)) == []
    assert taken(load(0.0), (ev.Tick(1.0), cmd.Unload("w", "c")), (lost,)) == []
    again = taken(load(0.0), (failed,), load(5.0), (lost,))
    assert [parts["sending"] for parts in again] == [3.0]


@given(st.lists(TOLD, min_size=1, max_size=6))
@example([{"files": 0.0}, {"files": 5e-324}])  # The mean of which is 0.
def test_shares_add_up_and_medians_are_of_all_loads(loads):
    times = LoadTimes()
    for parts in loads:
        times.add(parts)
    whole = sum(sum(parts.values()) for parts in loads)
    if not whole:
        assert times.shares() == {}
        return
    assert sum(times.shares().values()) == pytest.approx(1.0)
    data = load_times_data(times)
    assert data["seconds"] == pytest.approx(whole)
    for part, figures in data["parts"].items():
        of_loads = sorted(parts.get(part, 0.0) for parts in loads)
        assert figures["seconds"] == pytest.approx(sum(of_loads))
        assert figures["median"] <= of_loads[len(of_loads) // 2] * 1.01 + 1e-5
    assert [part for part, *_ in load_rows(times)] == list(data["parts"])


def test_a_table_has_bounded_columns_and_says_how_processes_began():
    times = LoadTimes()
    times.add({**{f"own {n}": 1.0 + n for n in range(20)}, "imports": 50.0}, "spawned")
    times.add({"imports": 1.0}, "forked")
    heads, rows = load_table({"c": times}, times)
    assert len(heads) == 3 + 8 + 1
    assert heads[-1] == "others"
    assert rows[-1] == ["  processes: 1 forked, 1 spawned"]
    assert [len(row) for row in rows] == [len(heads), 1]
    assert load_table({}, LoadTimes()) is None


def history_of(parts):
    """The history of a played run, whose loads told these parts."""
    lines = []
    Played(lines, items=2_000).play()
    return read_history([text.replace('"parts":{}', f'"parts":{json.dumps(parts)}') for text in lines])


def test_a_report_shows_them_as_text_data_and_page_and_what_a_context_calls_them_is_harmless():
    history = history_of({"imports": 20.0, EVIL[:40]: 5.0})
    report = Report(Path("run"), history, Transfers(), [], summarise(history))
    text = as_text(report)
    assert "Parts of loads" in text
    assert "80 %" in text
    data = as_data(report)
    assert data["summary"]["load_parts"]["parts"]["imports"]["share"] == pytest.approx(0.8)
    [loads] = data["history"]["contexts"].values()
    assert loads["load_parts"]["loads"] == loads["load_seconds"]["count"] > 0
    shown = Parsed(page(report, {}))
    assert "Where the time of loads went" in "".join(shown.text)
    assert not [tag for tag, _ in shown.elements if tag in ("script", "img")]
    bars = [attributes["class"] for tag, attributes in shown.elements if tag == "i" and "style" in attributes]
    assert {"l-imports", "l-other"} <= set(bars)


def test_a_log_of_an_earlier_version_has_none_and_says_nothing_of_them():
    history = history_of({})
    report = Report(Path("run"), history, Transfers(), [], summarise(history))
    assert "Parts of loads" not in as_text(report)
    assert as_data(report)["summary"]["load_parts"] is None


def test_a_log_without_the_fields_is_read():
    text = '{"event":{"is":"ContextReady","time":2.0,"worker":"w","context":"c","seconds":1.0},"commands":[]}\n'
    [(event, _)] = read([text])
    assert (event.parts, event.started) == ({}, "")


@context()
def slow():
    with load_part("weights"):
        import colorsys

        return colorsys.__name__


@batch_app(slow(), batch_size=4)
def same(one, items):
    return [one for _ in items]


def test_a_real_run_tells_where_the_time_of_its_loads_went(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Where the run goes into ./runs.
    with ContextExecutor(workers=1) as executor:
        assert same(1).result() == "colorsys"
        assert executor.status().loads == 1
    [log] = tmp_path.rglob("events.jsonl")
    with open(log) as file:
        history = read_history(file)
    times = history.load_times
    assert times.loads.count == 1
    assert {"process", "imports", "weights", "build"} <= set(times.parts)
    assert times.started == {"forked": 1}
    [(ready, begun)] = _loads(log)
    assert times.loads.total == pytest.approx(ready["time"] - begun, abs=1e-4)
    assert sum(ready["parts"].values()) == pytest.approx(ready["seconds"], abs=1e-5)


def test_the_program_of_the_page_on_reports_names_its_parts(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "program.py").write_text(program)
    run = forked.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert (run.returncode, run.stdout) == (0, "100\n"), run.stderr
    [log] = tmp_path.rglob("events.jsonl")
    with open(log) as file:
        assert {"imports", "weights", "index"} <= set(read_history(file).load_times.shares())


def _loads(log):
    """(ContextReady, when the first command of its load was given) of each load of a context."""
    begun, found = {}, []
    for text in log.read_text().splitlines()[1:]:
        record = json.loads(text)
        event = record["event"]
        if event["is"] == "ContextReady" and event["parts"].get("weights") is not None:
            found.append((event, begun[event["worker"], event["context"]]))
        for command in record["commands"]:
            if command["is"] in ("Stage", "Load"):
                begun.setdefault((command["worker"], command["context"]), event["time"])
    return found
