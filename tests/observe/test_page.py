"""The page: whole, safe, and of bounded size."""

import html.parser
import itertools
import re

import pytest
from observe_data import RUN
from played_run import Played

from ctxflow import ContextExecutor, batch_app
from ctxflow.errors import CtxflowError
from ctxflow.observe import run_report as reports
from ctxflow.observe.history import AppHistory, ContextLoads
from ctxflow.observe.history_reader import read_history, told_apart
from ctxflow.observe.run_report import Report, read_report
from ctxflow.observe.summary import SUMMARY, keep, summarise
from ctxflow.observe.transfers import MANAGER, ContextFile, Peer, Transfer, Transfers, file_trees

pytest.importorskip("jinja2")
from ctxflow.observe.page import page, write_page

EVIL = "<script>alert('row 3')</script>&\"'><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "br", "link", "hr", "input", "path", "use", "rect"}


class Parsed(html.parser.HTMLParser):
    """What a browser finds in a page: its elements, which must be closed in order, and its text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def drawn(report):
    pytest.importorskip("matplotlib")
    from ctxflow.observe.page import drawings

    return drawings(report)


def check(text):
    """It needs nothing else, and runs nothing."""
    parsed = Parsed(text)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "img"}
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href"):
                assert value.startswith(("#", "data:image/png;base64,"))
                assert value[0] != "#" or value[1:] in ids
    for used in re.findall(r"url\(([^)]*)\)", text):
        assert used[1:] in ids
    assert "@import" not in text
    return parsed


def test_a_recorded_run_with_transfer_trees():
    report = read_report(RUN)
    parsed = check(page(report, drawn(report)))
    text = "".join(parsed.text)
    for told in ("600", "62 % of the fluid bound", "lost to evictions", "11.0.w1a (host1)", "100.0 MB at 125.0 MB/s"):
        assert told in text
    assert "hard link on host2: 12.0.w2b" in text
    assert text.count("FAILED") == 1
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 8  # Four pictures for wide and for narrow screens.
    assert sum(tag == "details" for tag, _ in parsed.elements) > 10


def evil_report():
    lines = []
    Played(lines, 2000).play()
    history = read_history(lines)
    failure = {"kind": "exception", "error": EVIL, "message": EVIL, "traceback": EVIL, "worker": EVIL, "output": EVIL}
    history.causes.call(failure)
    history.apps["v"].name = history.apps["v"].spec["name"] = EVIL
    history.apps["v"].spec[EVIL] = [EVIL, {"a": EVIL}]
    history.tiers[EVIL] = history.tiers.pop("a10")
    history.hosts.add(EVIL)
    for group in history.accounts.groups:
        group.tier = group.gpu_model = EVIL
        group.hosts.add(EVIL)
    sends = [Transfer(EVIL, MANAGER, EVIL, "sent", 0.0, 0.0, 1.0, 5), Transfer(EVIL, EVIL, "b", "linked", 1, 1, 2, 5)]
    sends.append(Transfer(EVIL, EVIL, "c", "sent", 1.0, 1.0, 2.0, None, EVIL))
    found = Transfers(sends, {EVIL: ContextFile(EVIL, EVIL, 5, EVIL)}, {"b": Peer("b", EVIL), EVIL: Peer(EVIL, EVIL)})
    batch = {"job": {"template": EVIL, EVIL: EVIL}, "site": {"name": EVIL}, "output": f"/{EVIL}"}
    causes = history.causes.ordered()
    return Report(RUN / EVIL, history, found, file_trees(sends), summarise(history), causes, batch)


def test_all_that_comes_from_the_run_is_escaped():
    report = evil_report()
    parsed = check(page(report, drawn(report)))
    assert "".join(parsed.text).count("<script>alert('row 3')</script>") > 15


def test_two_hundred_workers_with_their_transfers_are_less_than_two_megabytes():
    lines = []
    Played(lines, 2000).play()
    history = read_history(lines)
    peers = {f"w{n}": Peer(f"w{n}", f"node{n // 2}", f"h:{n}", 0.0, 300.0 if n % 9 == 0 else None) for n in range(200)}
    sends = [
        Transfer(f"f{f}", MANAGER if n == 0 else f"w{n // 2}", f"w{n}", "linked" if n % 2 else "sent", n, n, n + 1.0, 9)
        for f in range(20)
        for n in range(200)
    ]
    for n in range(3000):
        history.causes.call({"kind": "exception", "error": f"Error{n}", "message": "x" * 999, "traceback": "y" * 99999})
    found = Transfers(sends, {}, peers)
    report = Report(RUN, history, found, file_trees(sends), summarise(history), history.causes.ordered())
    text = page(report, drawn(report))
    assert len(text.encode()) < 2_000_000
    parsed = "".join(check(text).text)
    assert "... and 451 more causes (--all shows them)" in parsed
    whole = page(report, {}, every=True)
    assert "more causes" not in whole
    assert whole.count("class=failed") == 0


def test_a_tree_of_any_depth():
    sends = [Transfer("f", f"w{n}", f"w{n + 1}", "sent", n, n, n + 1.0, 9) for n in range(3000)]
    report = Report(RUN, None, Transfers(sends), file_trees(sends))
    text = "".join(Parsed(page(report, {}, every=True)).text)
    assert "w3000" in text
    text = "".join(Parsed(page(report, {})).text)
    assert "These are the first 400 of 3,000 transfers" in text


def test_a_run_of_which_only_the_summary_was_kept(tmp_path):
    lines = []
    Played(lines, 500).play()
    keep(tmp_path, SUMMARY, summarise(read_history(lines)))
    report = read_report(reports.find_run(tmp_path))
    assert report.history is None
    assert "GPU-minutes" in "".join(check(page(report, {})).text)


def test_the_page_begins_with_a_conclusion_and_says_if_the_run_was_simulated():
    report = read_report(RUN)
    text = "".join(Parsed(page(report, {})).text)
    conclusion = (
        "60\N{NO-BREAK SPACE}% of the time was useful; most of the rest, 37\N{NO-BREAK SPACE}%, went into loading"
    )
    assert 0 < text.index(conclusion) < text.index("items done")
    assert "simulated run" not in text
    report.history.simulated = True
    assert "A simulated run: all times are virtual" in "".join(Parsed(page(report, {})).text)


def test_two_templates_of_one_app_are_two_names(tmp_path):
    @batch_app
    def judge(claims, *, template, top=1):
        return [template for _ in claims]

    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    beginning = "Here is a claim, of which somebody wants to know whether it is "
    with executor:
        for template in (f"{beginning}true.", f"{beginning}false.", "Short."):
            list(judge.map(["a"], template=template))
        list(judge.map(["a"], template="Short.", top=2))
    report = read_report(reports.find_run(tmp_path))
    names = [app.name for app in report.history.apps.values()]
    assert len(set(names)) == 4, "each is told apart"
    for name, part in zip(names, ("true.", "false.", "Short.", "top=2"), strict=True):
        assert name.startswith("judge (") and part in name and len(name) < 80
    text = "".join(Parsed(page(report, {})).text)
    assert all(text.count(name) >= 2 for name in names), "in the table of calls and in the settings"


def test_names_that_nothing_tells_apart_are_numbered():
    apps = {
        "a": AppHistory("judge", {"context": "c"}),
        "b": AppHistory("judge", {"context": "d"}),
        "c": AppHistory("other"),
    }
    assert list(told_apart(apps).values()) == ["judge #1", "judge #2", "other"]
    assert list(told_apart(apps, {"c": "small", "d": "large"}).values()) == [
        "judge by small",
        "judge by large",
        "other",
    ]
    loads = {"c": ContextLoads("encoder"), "d": ContextLoads("encoder")}
    assert list(told_apart(loads).values()) == ["encoder #1", "encoder #2"]


def test_a_page_is_written_whole_and_whatever_it_holds(tmp_path):
    write_page(tmp_path / "new" / "a.html", "a lone surrogate: \ud800")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.html"]
    assert (tmp_path / "new" / "a.html").read_bytes() == b"a lone surrogate: ?"


def test_without_jinja2_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(CtxflowError, match=r"a page needs jinja2: .*pip install .*\[report\]'?"):
        page(Report(RUN, None, Transfers(), []), {})


def test_pictures_take_their_colours_from_the_page():
    pictures = drawn(read_report(RUN))
    for picture in itertools.chain(*pictures.values()):
        assert "var(--c-222222, #222222)" in picture
        assert not re.search(r"(fill|stroke): #", picture)
        assert "DejaVu" not in picture
