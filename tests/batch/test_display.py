"""The view of a job and the lines in its place, rendered at fixed widths."""

import dataclasses
import io
import re
import time
import types

import pytest
from rich.console import Console

from ctxflow.batch import display
from ctxflow.batch.display import JobView, LineDisplay, LiveDisplay, QuietDisplay, make_display
from ctxflow.batch.job_status import describe, told
from ctxflow.observe.progress import Progress

WIDTHS = (80, 100, 160)


def tier(joined, asked, gpus=1.0, cost=None):
    return {"joined": joined, "asked": asked, "gpu_hours": joined * gpus, "worker_hours": joined * 1.0, "cost": cost}


TWO = Progress(
    done=12_345, total=50_000, guessed=True, seconds=83.2, rate=152.7, rate_overall=148.4, left=253.7, left_low=230.1,
    left_high=281.9, workers=2, tiers={"local": tier(2, 2, gpus=0.0)}, worker_hours=0.25,
    contexts={"encoder": {"warm": 1, "loading": 1}},
)  # fmt: skip

TWO_HUNDRED = Progress(
    done=5_123_456, dead=1234, total=10_000_000, seconds=8323.2, rate=652.7, rate_overall=615.7, tokens=10**9,
    tokens_per_s=183_412.3, tokens_per_s_overall=172_800.5, left=7470, left_low=6980, left_high=None, workers=200,
    tiers={
        "a10": tier(104, 120, cost=84.08), "a100-80": tier(48, 50, cost=133.06), "titan": tier(36, 36, cost=8.32),
        "h100": tier(12, 30, cost=69.3), "l40s": tier(0, 14, cost=0.0),
    },
    contexts={"generator": {"warm": 181, "loading": 11, "staging": 8}}, evictions=57, crashes=2, gpu_hours=462.1,
    worker_hours=462.1, cost=310.55, newest_dead="claims.csv, row 18 below the header: ValueError: " + 90 * "no ",
)  # fmt: skip


def lines_of(now, width, *told_of, encoding="utf-8", **more):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    Console(file=stream, width=width, **more).print(JobView(now, "/home/somebody/results.jsonl", *told_of))
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "now", [TWO, TWO_HUNDRED, Progress(), Progress(done=3, workers=1)], ids=lambda now: now.workers
)
def test_no_line_is_wider_than_the_terminal_and_nothing_scrolls(now, width):
    lines = lines_of(now, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 20


@pytest.mark.parametrize("width", WIDTHS)
def test_two_workers(width):
    text = "\n".join(lines_of(TWO, width))
    for part in (
        "results.jsonl", "running for 1 min 23 s", "24.6%", "12,345 done, about 37,655 left", "153 rows/s",
        "148 rows/s", "4 min 13 s, likely 3 min 50 s to 4 min 41 s", "2 of 2 asked for (local)", "1 warm, 1 loading",
        "0 evictions", "0.25 worker-hours",
    ):  # fmt: skip
        assert part in text
    for part in ("dead", "tokens", "cost", "GPU-hours", "crash"):
        assert part not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_two_hundred_workers(width):
    lines = lines_of(TWO_HUNDRED, width)
    text = "\n".join(lines)
    for part in (
        "51.2%", "5,123,456 done, 1,234 dead, 4,875,310 left", "653 rows/s, 183,412 tokens/s",
        "616 rows/s, 172,800 tokens/s", "2 h 04 min, likely 1 h 56 min at least", "200 of 250 asked for",
        "181 warm, 11 loading, 8 staging", "57 evictions, 2 crashes", "462 GPU-hours, cost 310.55", "104 of 120",
        "newest dead letter: claims.csv, row 18 below the header: ValueError: no",
    ):  # fmt: skip
        assert part in text
    order = [next(n for n, line in enumerate(lines) if name in line) for name in TWO_HUNDRED.tiers]
    assert order == sorted(order), "the tiers with the most workers come first"
    row = next(line for line in lines if "a100-80" in line)
    assert row.split()[-5:] == ["48", "of", "50", "48.0", "133.06"]


def test_a_wide_terminal_is_used():
    wide, narrow = lines_of(TWO, 160), lines_of(TWO, 80)
    assert len(wide) == len(narrow) - 4
    assert any("done" in line and "workers" in line for line in wide)
    assert len(wide[1]) == 160


@pytest.mark.parametrize(("count", "others"), [(8, []), (9, ["2 others"])])
def test_tiers_have_a_line_each_while_there_are_few(count, others):
    tiers = {f"tier-{n}": tier(n, n) for n in range(1, count + 1)}
    lines = lines_of(Progress(workers=36, tiers=tiers, gpu_hours=36.0, worker_hours=36.0), 80)
    shown = [line[:9].strip() for line in lines if line.startswith("tier-")]
    assert shown == [f"tier-{n}" for n in range(count, 2 * len(others), -1)]
    assert [line[:8] for line in lines if "others" in line] == others


def test_many_tiers_become_one_line():
    tiers = {f"tier-{n}": tier(n, 2 * n, cost=1.0) for n in range(1, 31)}
    now = Progress(workers=465, tiers=tiers, gpu_hours=465.0, worker_hours=465.0)
    lines = lines_of(now, 80)
    assert len(lines) <= 20
    assert "tier-30 " in "\n".join(lines) and "tier-20 " not in "\n".join(lines)
    rest = next(line for line in lines if "others" in line)
    assert rest.split()[:2] == ["23", "others"] and rest.split()[-5:] == ["276", "of", "552", "276", "23.00"]


def test_a_tier_that_nobody_asked_for_is_counted_all_the_same():
    now = Progress(workers=3, tiers={"by-hand": tier(1, None), "a10": tier(2, 4)}, gpu_hours=3.0, worker_hours=3.0)
    lines = lines_of(now, 80)
    assert any(line.split() == ["workers", "3", "of", "4", "asked", "for"] for line in lines)
    assert any(line.split() == ["by-hand", "1", "1.00"] for line in lines)


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        ({"state": "failed", "reason": "the disk is full"}, ["failed after 1 min 23 s", "the disk is full"]),
        ({"state": "done"}, ["done after 1 min 23 s"]),
        ({"state": "interrupted", "updated": 0.0}, ["interrupted after", "the same command goes on from there"]),
        (
            {"state": "running", "updated": 0.0, "host": "far", "pid": 7},
            ["silent", "process 7 on far", "see if it lives"],
        ),
    ],
)
def test_what_became_of_a_job_is_said(status, parts):
    text = " ".join(line.rstrip() for line in lines_of(TWO, 80, *told(status)))
    assert all(part in text for part in parts)
    if status["state"] != "running":
        assert "time left" not in text and "153 rows/s" not in text


def test_long_titles_lose_their_beginning():
    stream = io.StringIO()
    Console(file=stream, width=80).print(JobView(TWO, "/very" * 40 + "/results.jsonl"))
    first = stream.getvalue().splitlines()[0]
    assert first.startswith("...") and "/results.jsonl" in first and first.endswith("1 min 23 s")


def test_an_old_terminal_gets_marks_that_it_has():
    lines = lines_of(TWO_HUNDRED, 80, encoding="ascii")
    assert set(lines[1]) <= set("#x- 0123456789.%")
    assert lines[1].count("#") > 30 and lines[1].count("x") == 1


def colours(**more):
    lines = lines_of(TWO_HUNDRED, 80, force_terminal=True, color_system="truecolor", legacy_windows=False, **more)
    codes = [code for part in "\n".join(lines).split("\x1b[")[1:] for code in part.split("m")[0].split(";")]
    return {int(code) for code in codes if code}


def test_only_the_terminals_own_colours_are_used_and_none_where_none_are_wanted():
    assert colours() <= {0, 1, 22, 31, 32, 33}, "bold, red, green and yellow: no grey, no background"
    assert colours(no_color=True) <= {0, 1, 22}


def test_the_bar_is_full_at_the_end_and_not_before():
    almost = lines_of(Progress(done=9_999_999, total=10_000_000, workers=1), 80)[1]
    assert "99.9%" in almost and "─" in almost
    over = lines_of(Progress(done=120, total=100, guessed=True, workers=1), 80)[1]
    assert over.endswith("100%") and "─" not in over


def test_the_live_view_keeps_sentences_above_and_goes_away_at_the_end():
    stream = io.StringIO()
    view = LiveDisplay(Console(file=stream, width=80, force_terminal=True, color_system=None), "results.jsonl")
    view.note("going on: 3 rows are done")
    view.progress(TWO)
    view.dead("in.jsonl, line 9", "bad\nthing")
    view.progress(TWO_HUNDRED)
    view.end()
    said = stream.getvalue()
    for part in ("ctxflow: going on", "in.jsonl, line 9: bad thing", "12,345", "5,123,456"):
        assert part in said
    assert said.rstrip().endswith("\x1b[2K"), "its lines are wiped"


def test_lines_come_every_so_often_where_there_is_no_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    lines = LineDisplay(stream)
    for now[0], progress in ((5.0, TWO), (11.0, TWO), (12.0, TWO_HUNDRED), (30.0, TWO_HUNDRED)):
        lines.progress(progress)
    told = stream.getvalue().splitlines()
    assert [line[9:] for line in told] == [describe(TWO), describe(TWO_HUNDRED)]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d ", line[:9]) for line in told), "each says the time of day"
    assert "\x1b" not in stream.getvalue()
    assert describe(TWO) == "12,345 of about 50,000 rows, 153 rows/s, 4 min 13 s left, 2 workers, 1 loading"


def test_the_display_fits_where_it_goes(monkeypatch, capsys):
    assert type(make_display(quiet=False)) is LineDisplay
    quiet = make_display(quiet=True)
    assert type(quiet) is QuietDisplay
    quiet.note("a")
    quiet.dead("b", "c")
    quiet.progress(TWO)
    quiet.end()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(make_display(quiet=False)) is LiveDisplay
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert type(make_display(quiet=False, filters=True)) is LineDisplay, "results have the terminal"


TALKS = Progress(
    unit="items", workers=2, seconds=60.0, chunks=1200, chunks_per_s=4.5, migrations=1,
    sessions={"running": 7, "waiting": 1, "migrating": 0, "idle": 3, "suspended": 2},
)  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_sessions_are_told_by_what_they_do(width):
    lines = lines_of(TALKS, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "sessions 7 running, 1 waiting, 3 idle, 2 suspended" in text
    assert "chunks 1,200 made, 4.5 chunks/s now, 1 migration" in text
    assert "items" not in text, "there are none"


def test_items_beside_sessions_are_told_too():
    text = " ".join(lines_of(dataclasses.replace(TALKS, read=9, done=4, running=5), 80))
    assert "4 done, 5 queued or running" in text and "7 running" in text


def test_when_a_run_has_ended_its_chunks_are_told_and_no_sessions():
    text = " ".join(" ".join(lines_of(TALKS, 80, "done")).split())
    assert "chunks 1,200 made, 1 migration" in text and "sessions" not in text


def test_a_batch_has_no_sessions():
    assert "sessions" not in " ".join(lines_of(TWO, 80))


def test_why_workers_are_lacking_is_shown_and_what_a_terminal_would_obey_is_not():
    reason = "its jobs are held: via condor_hold (by user root)\x1b[2J"
    tier = {"joined": 1, "asked": 3, "gpu_hours": 0.0, "worker_hours": 1.0, "cost": None, "reason": reason}
    enough = {**tier, "joined": 3}
    lacking = "gpu lacks 2 workers: its jobs are held: via condor_hold (by user root)[2J"
    assert describe(Progress(workers=1, tiers={"gpu": tier})).endswith(f"1 worker; {lacking}")
    assert "lacks" not in describe(Progress(workers=3, tiers={"gpu": enough}))
    stream = io.StringIO()
    Console(file=stream, width=100).print(JobView(Progress(workers=1, tiers={"gpu": tier, "b": enough}), "out.jsonl"))
    assert lacking in " ".join(stream.getvalue().split()) and "b lacks" not in stream.getvalue()


def test_what_keeps_workers_away_is_told_with_its_tier_and_for_how_long_and_not_once_the_run_has_ended():
    now = Progress(
        workers=1,
        tiers={"a10": tier(1, 1), "h100": tier(0, 0)},
        causes=[
            {"kind": "queue", "text": "2 jobs wait for machines", "tier": "a10"},
            {"kind": "drain", "text": "tier h100 is drained", "tier": "h100"},
            {"kind": "quarantine", "text": "host n3 gets no work", "host": "n3", "until": time.time() + 21_000.5},
        ],
    )
    told = ("tier a10: 2 jobs wait for machines", "tier h100 is drained", "host n3 gets no work, 5 h 50 min left")
    assert describe(now).endswith("; ".join(told))
    shown = " ".join(" ".join(lines_of(now, 100)).split())
    assert all(text in shown for text in told)
    assert describe(now, ended=True).endswith("1 worker")
    for state in ("done", "failed", "died"):
        shown = " ".join(lines_of(now, 100, state))
        assert not any(text in shown for text in told)
