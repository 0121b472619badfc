"""How far maps have come, as somebody sees it: on a terminal by itself, in lines where that is asked for."""

import os
import pty
import re
import select
import subprocess
import sys
import textwrap

import forked
from ctxflow import map_results
from waiting import eventually, exited, joined, patience

PROGRAM = """
import sys, time
from ctxflow import ContextExecutor, batch_app, map_results

@batch_app(batch_size=2)
def nap(seconds):
    import time
    time.sleep(sum(seconds))
    return list(seconds)

with ContextExecutor(workers=1, log_events=False):
"""


def shown(program, folder, output=subprocess.PIPE):
    """What a program writes to a terminal that is its standard error, and to a pipe that is its output.

    :param output: None for the terminal.
    """
    master, slave = pty.openpty()
    words = [sys.executable, "-c", PROGRAM + textwrap.indent(textwrap.dedent(program), "    ")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    seen = b""
    with forked.Popen(words, cwd=folder, stdout=output or slave, stderr=slave, env=environment) as run:
        os.close(slave)

        def closed():
            nonlocal seen
            if select.select([master], [], [], 0.1)[0]:
                try:
                    seen += os.read(master, 1 << 16)
                except OSError:  # The other end is closed.
                    return True
            return False

        eventually(closed)
        out = run.stdout.read().decode() if output else ""
        assert exited(run) == 0, seen.decode()
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode()), seen, out


def test_maps_that_take_a_while_show_themselves_on_a_terminal(tmp_path):
    program = """
    list(nap.map([0.0], progress=False))  # The worker is there.
    shown_after, map_results._AFTER_SECONDS = map_results._AFTER_SECONDS, 600.0
    print(list(nap.map([0.1] * 4)))
    map_results._AFTER_SECONDS = shown_after
    print(len(list(nap.map([0.6] * 4, progress=False))))
    for pair in zip(nap.map([0.5] * 4), nap.using(priority=1).map(iter([0.5] * 4))):
        print(pair)
    """
    text, raw, out = shown(program, tmp_path)
    assert out == "[0.1, 0.1, 0.1, 0.1]\n4\n" + "(0.5, 0.5)\n" * 4, "what the program prints goes where it goes"
    assert re.search(r"nap.map [^\n]* [1-3]/4 ", text), "a bar"
    assert re.search(r"nap.map [^\n]* 4/4 .*/s", text), "to its end"
    assert re.search(r"nap.map [^\n]* [1-4]/\? ", text), "and one whose length is not known"
    assert raw.rindex(b"\x1b[?25h") > raw.rindex(b"\x1b[?25l"), "the cursor is back"
    first = text.index("nap.map")
    assert not re.search("nap.map", text[:first]) and text.count("Traceback") == 0
    assert raw.count(b"\x1b[?25l") == 1, "neither the quick one nor the one that is to be silent was shown"


def screen(raw):
    """The lines of a terminal without an end, on which something was written."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", raw.decode()):
        if token == "\n":
            lines.append("")
            column = 0
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif not token.startswith("\x1b"):
            lines[-1] = lines[-1][:column].ljust(column) + token + lines[-1][column + 1 :]
            column += 1
    return lines


def test_what_a_program_prints_stays_whole_beside_a_map(tmp_path):
    program = """
    map_results._AFTER_SECONDS = map_results._EVERY_SECONDS = 0.01
    longest = "x" * 700
    pause = lambda: time.sleep(0.3)  # While the map is drawn.
    results = nap.map([0.5] * 8)
    for number, result in enumerate(results):
        print(".", end="", flush=True)
        pause()
        if number == 2:
            print("\\na whole line")
            pause()
            print(longest, file=sys.stderr)
            pause()
            sys.stdout.buffer.write(b"by")
            pause()
            sys.stdout.buffer.write(b"tes\\n")
        pause()
    print("|")
    assert sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    """
    raw = shown(program, tmp_path, output=None)[1]
    lines = screen(raw)
    told = [line for line in lines if line and "nap.map" not in line]
    assert told == ["...", "a whole line", "x" * 700, "bytes", ".....|"], lines
    assert raw.count(b"nap.map") > 3, "and it was shown meanwhile"


class EndsOnceShown:
    """A map that ends just after it was looked at."""

    called = "nap"

    def __init__(self):
        self.looks = 0

    def is_over(self):
        self.looks += 1
        return self.looks > 1

    def answered_items(self):
        return 2 * self.looks


def test_a_map_that_ends_once_it_was_shown_is_shown_again(capsys, monkeypatch):
    monkeypatch.setattr(map_results, "_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(map_results, "_view", map_results._Lines)  # As where there is neither terminal nor notebook.
    board = map_results._Board()
    board.add(EndsOnceShown(), 4)
    thread = board._thread
    if thread is not None:
        joined(thread)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("nap.map: 2 of 4") and last.startswith("nap.map: ") and " in " in last


def test_lines_where_there_is_no_terminal(tmp_path):
    program = (
        PROGRAM
        + """
    map_results._AFTER_SECONDS = 0.5
    list(nap.map([0.5] * 6, progress=True))
    list(nap.map(iter([0.5] * 6), progress=True))
    list(nap.map([0.7] * 4))
"""
    )
    run = forked.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True, text=True, timeout=patience()
    )
    lines = [line for line in run.stderr.splitlines() if ".map" in line]
    name, end = "nap[.]map: ", "6 in [0-9]+ s, .*/s"
    assert re.fullmatch(f"({name}[0-5] of 6, .*/s\n)+{name}{end}\n({name}[0-5], .*/s\n)+{name}{end}", "\n".join(lines))
