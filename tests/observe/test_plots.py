"""Pictures: they are drawn from real runs and from odd ones, in every form."""

import pytest
from observe_data import EVENTS, RUN

from ctxflow.observe.history import History, read_history
from ctxflow.observe.plots import draw
from ctxflow.observe.report import read_report
from ctxflow.observe.staging import Peer
from ctxflow.observe.transfers import MANAGER, Transfer, Transfers
from ctxflow.observe.tree import file_trees

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_all_three(tmp_path, form, begins):
    report = read_report(RUN)
    written = draw(tmp_path / "new", report.history, report.transfers, report.trees, form)
    assert [path.name for path in written] == [
        f"{name}.{form}" for name in ("transfers", "workers_and_items", "call_times")
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
    assert [path.stem for path in draw(tmp_path, history, Transfers(), [])] == ["workers_and_items", "call_times"]
