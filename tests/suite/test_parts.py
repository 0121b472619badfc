"""Parts of the suite run beside each other."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from suite import parts
from waiting import output

TESTS = Path(__file__).resolve().parents[1]


def say(text, status=0):
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({status})"]


def test_what_all_say_is_printed_and_what_failed_is_repeated_at_the_end(tmp_path, capsys):
    commands = {"lint": say("clean"), "local": say("dots\nFAILED tests/test_a.py::test_b - why", 1)}
    assert parts.beside(commands, os.environ, tmp_path) == 1
    said = capsys.readouterr().out
    assert "clean" in said
    assert said.splitlines()[-3:-1] == ["FAILED local", "FAILED tests/test_a.py::test_b - why"]
    assert parts.beside({"lint": say("clean")}, os.environ, tmp_path) == 0


def test_engines_begin_when_the_testbeds_tests_have_ended(tmp_path):
    mark = tmp_path / "ended"
    cluster = [sys.executable, "-c", f"import time; time.sleep(1); open({str(mark)!r}, 'w')"]
    engines = [sys.executable, "-c", f"open({str(mark)!r})"]
    assert parts.beside({"engines": engines, "cluster": cluster}, os.environ, tmp_path) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_cancelled_ci_interrupt_all_parts_and_wait_for_their_ends(tmp_path, number):
    part = "import time\ntry:\n  print('begun', flush=True)\n  while True: time.sleep(0.1)\n"
    part += "except KeyboardInterrupt: print('cleaned')"
    program = (
        f"import os, sys; sys.path.insert(0, {str(TESTS)!r}); from pathlib import Path; from suite import parts\n"
        "parts.interrupt_at_signals()\n"
        f"sys.exit(parts.beside({{'local': [sys.executable, '-c', {part!r}]}}, os.environ, Path({str(tmp_path)!r})))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        log = tmp_path / "local.log"
        while not (log.exists() and "begun" in log.read_text()):
            assert run.poll() is None
        run.send_signal(number)
        said, _ = output(run, within=60)
    assert run.returncode == 130 and "Interrupted" in said
    assert log.read_text() == "begun\ncleaned\n"


@pytest.mark.parametrize("depth", ["quick", "test"])
def test_only_a_quick_run_leaves_out_models(depth):
    words = parts._command("local", parts.How(depth, seed="7", shard="2/3"))
    assert ("not model" in words) == (depth == "quick")
    assert "--randomly-seed=7" in words and "--shard=2/3" in words
