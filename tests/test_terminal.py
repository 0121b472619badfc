"""Foreign text on a terminal: it is read, and never obeyed."""

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table

from ctxflow import terminal as terminals
from ctxflow.batch.display import JobView, LineDisplay
from ctxflow.cli.app import main
from ctxflow.errors import CtxflowError, one_line, visible
from ctxflow.executors.bare import tell
from ctxflow.observe.progress import VERSION, Progress
from ctxflow.terminal import guard_log, guarded_streams, visible_console

EVIL = "bad \x1b]0;owned\x07\x1b[2J\x9b5nrow\r\b\u202e"
SEEN = "bad ]0;owned[2J5nrow"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # What rich says: colours, and where to draw.


class Terminal(io.StringIO):
    """Takes the place of the standard output and error within `with`."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def __enter__(self):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(contextlib.redirect_stdout(self))
        self.stack.enter_context(contextlib.redirect_stderr(self))
        return self

    def __exit__(self, *_):
        self.stack.close()


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return terminal


def test_text_keeps_its_lines_and_loses_its_commands():
    assert visible(EVIL) == SEEN and visible("as\tit is\n") == "as\tit is\n"
    assert one_line(EVIL) == SEEN


def test_what_is_printed_to_a_terminal_is_visible_and_what_is_piped_is_as_it_is(terminal):
    piped = io.StringIO()
    with terminal, contextlib.redirect_stdout(piped):
        with guarded_streams():
            print(EVIL, file=sys.stderr)
            sys.stderr.writelines([EVIL])
            print(EVIL)
        print("after", file=sys.stderr)
    assert terminal.getvalue() == f"{SEEN}\n{SEEN}after\n" and piped.getvalue() == f"{EVIL}\n"


def test_what_rich_draws_of_foreign_text_is_visible_and_still_has_colours(terminal):
    with terminal, guarded_streams():
        console = visible_console(stderr=True)
        console.print(EVIL, markup=False, style="red")
        tier = {"joined": 1, "asked": 2, "gpu_hours": 1.0, "worker_hours": 1.0, "cost": None}
        tiers = {EVIL: tier, "[bold]a[/x]": tier}  # As a forged status file may have them.
        now = Progress(newest_dead=EVIL, done=1, total=2, workers=1, tiers=tiers)
        with Live(JobView(now, EVIL, "failed", EVIL, "red"), console=console, auto_refresh=False) as live:
            print(EVIL, file=sys.stderr)
            live.refresh()
    drawn = terminal.getvalue()
    assert SEEN in drawn and "\x1b[31m" in drawn and "[bold]a[/x]" in drawn
    assert not OBEYED.search(OWN.sub("", drawn).replace("\r", ""))
    assert "\x1b[2J" not in drawn and "\x1b[5n" not in drawn


def test_the_command_says_no_foreign_command(terminal, monkeypatch):
    def fails(**options):
        raise CtxflowError(f"a worker said: {EVIL}")

    monkeypatch.setattr("ctxflow.cli.app.app", fails)
    with terminal, pytest.raises(SystemExit):
        main()
    assert terminal.getvalue() == f"ctxflow: a worker said: {SEEN}\n"


def test_a_forged_status_file_is_only_read(terminal, monkeypatch, tmp_path):
    status = {"version": VERSION, "state": "failed", "reason": EVIL, "output": EVIL, "run": "", "updated": time.time()}
    (tmp_path / "out.jsonl.status.json").write_text(json.dumps({**status, "newest_dead": EVIL}))
    monkeypatch.setattr(sys, "argv", ["ctxflow", "status", str(tmp_path / "out.jsonl.status.json")])
    with terminal, pytest.raises(SystemExit):
        main()
    assert SEEN in terminal.getvalue()
    assert not OBEYED.search(OWN.sub("", terminal.getvalue()).replace("\r", ""))
    assert "\x1b[2J" not in terminal.getvalue()


def test_programs_of_others_are_told_visible_text(terminal, caplog):
    with terminal:
        tell(EVIL)
    LineDisplay(terminal).dead("row 1", EVIL)
    LineDisplay(terminal).note(EVIL)
    assert not OBEYED.search(terminal.getvalue()) and terminal.getvalue().count(SEEN) == 3
    logger = logging.getLogger("ctxflow")
    guard_log(logger)
    guard_log(logger)
    with caplog.at_level(logging.WARNING, "ctxflow"):
        logger.warning("a worker said: %s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            logger.exception("a callback raised")
    assert caplog.messages == [f"a worker said: {SEEN}", "a callback raised"]
    assert f"ValueError: {SEEN}" in caplog.text and not OBEYED.search(caplog.text)


def test_there_is_one_log_which_is_guarded():
    """A filter of a logger says nothing of the loggers below it, whose lines its handlers write all the same."""
    sources = Path(terminals.__file__).parent.rglob("*.py")
    assert not [path.name for path in sources if "getLogger(__name__)" in path.read_text(encoding="utf-8")]


def test_nobody_draws_past_the_one_place():
    sources = Path(terminals.__file__).parent.rglob("*.py")
    makers = [path.name for path in sources if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))]
    assert not makers


def test_the_log_of_a_plain_program_has_the_time_of_day_and_is_written_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import logging, sys\n"
        "if sys.argv[1] == 'own': logging.basicConfig(format='mine %(message)s')\n"
        "import ctxflow.executors.live_run\n"
        "logger = logging.getLogger('ctxflow')\n"
        "if sys.argv[1] == 'handler':\n"
        "    logger.addHandler(logging.StreamHandler())\n"
        "    logger.propagate = False\n"
        "logger.info('it is well')\n"
        "logger.warning('worker %d is gone', 3)\n"
    )

    def said(way):
        return subprocess.run(
            [sys.executable, str(program), way], capture_output=True, check=True, text=True
        ).stderr.splitlines()

    [line] = said("plain")
    assert re.fullmatch(r"\d\d:\d\d:\d\d worker 3 is gone", line)
    assert said("own") == ["mine worker 3 is gone"]
    assert said("handler") == ["worker 3 is gone"]


WORDS = [f"gpu-node-{n:03}.hpc.example.org.{'x' * n}" for n in range(0, 300, 50)]


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    return io.StringIO()


def test_a_table_that_goes_to_a_pipe_is_whole(pipe):
    table = Table(*WORDS)
    table.add_row(*reversed(WORDS))
    with contextlib.redirect_stdout(pipe):
        visible_console().print(table)
        visible_console().print(" ".join(WORDS))
    lines = pipe.getvalue().splitlines()
    assert all(word in lines[1] and word in lines[3] for word in WORDS) and lines[-1] == " ".join(WORDS)


def test_a_view_that_goes_to_a_pipe_is_whole_and_no_wider_than_it_has_to_be(pipe):
    tier = {"joined": 1, "asked": 20, "gpu_hours": 1.0, "worker_hours": 1.0, "cost": None, "reason": WORDS[-1]}
    now = Progress(newest_dead=WORDS[-1], done=1, total=2, seconds=3.0, workers=1, tiers=dict.fromkeys(WORDS, tier))
    with contextlib.redirect_stdout(pipe):
        visible_console().print(JobView(now, WORDS[-1]))
        visible_console().print(JobView(now, "short"))
    lines = pipe.getvalue().splitlines()
    titles = [n for n, line in enumerate(lines) if line.rstrip().endswith("running for 3.0 s")]
    assert lines[titles[0]].startswith(WORDS[-1]) and len(lines[titles[1]]) == 80
    for word in WORDS:
        assert sum(line.startswith(f"{word} ") for line in lines) >= 2, "its tier's line, in both"
    assert f"newest dead letter: {WORDS[-1]}" in lines and any(line.endswith(WORDS[-1]) for line in lines)
