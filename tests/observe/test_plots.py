"""Pictures: they are drawn from real runs and from odd ones, in every form."""

import json

import pytest
from observe_data import EVENTS, RUN

from ctxflow.observe.history import History
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.plots import draw, workers_and_items
from ctxflow.observe.run_report import read_report
from ctxflow.observe.transfers import MANAGER, Peer, Transfer, Transfers, file_trees

Figure = pytest.importorskip("matplotlib.figure").Figure


@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_all_four(tmp_path, form, begins):
    report = read_report(RUN)
    written = draw(tmp_path / "new", report.history, report.transfers, report.trees, form)
    assert [path.name for path in written] == [
        f"{name}.{form}" for name in ("transfers", "workers_and_items", "call_times", "lifetimes")
    ]
    for path in written:
        assert path.read_bytes().startswith(begins)


def test_nothing_to_draw(tmp_path):
    assert draw(tmp_path, None, Transfers(), []) == []
    assert draw(tmp_path, History(), Transfers(), []) == []


def test_many_workers_of_many_hosts(tmp_path):
    peers = {f"w{n}": Peer(f"w{n}", f"host{n // 4}", f"h:{n}", 0.0, 9.0 if n % 9 == 0 else None) for n in range(600)}
    some = [
        Transfer(f"f{n % 9}", MANAGER if n < 9 else f"w{n // 2}", f"w{n}", "sent", n / 100, n / 100, n / 100 + 1, 10)
        for n in range(600)
    ]
    some.append(Transfer("f0", "", "w0", "sent", 1.0, None, None, None, "it was not over when the log ended"))
    found = Transfers(some, {}, peers)
    [picture] = draw(tmp_path, None, found, file_trees(some), "svg")
    assert picture.stat().st_size > 10_000


def test_a_run_of_one_call(tmp_path):
    with open(EVENTS) as file:
        lines = file.readlines()
    end = next(n for n, line in enumerate(lines) if "BatchFinished" in line)
    history = read_history(lines[: end + 1])
    assert [path.stem for path in draw(tmp_path, history, Transfers(), [])] == [
        "workers_and_items",
        "call_times",
        "lifetimes",
    ]


def test_more_tiers_than_colours(tmp_path):
    """The largest have a colour of their own; the others are one area, and all are counted."""

    def line(kind, time, **fields):
        return json.dumps({"event": {"is": kind, "time": time, **fields}, "commands": []}) + "\n"

    workers = [{"id": f"w{n}", "host": "h", "tier": f"tier-{n}"} for n in range(8)]
    joins = [line("WorkerJoined", 1.0 + n, worker=worker) for n, worker in enumerate(workers)]
    losses = [line("WorkerLost", 20.0 + n, worker=f"w{n}", evicted=True) for n in range(8)]
    history = read_history([*joins, *losses])
    figure = workers_and_items(Figure, history)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"tier-{n}" for n in range(5)] + ["other tiers", "eviction"]
    [total] = [line for line in figure.axes[0].lines if line.get_zorder() == 3]
    assert max(total.get_ydata()) == 8
    assert [path.stem for path in draw(tmp_path, history, Transfers(), [])] == ["workers_and_items", "lifetimes"]
