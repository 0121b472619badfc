"""A command imports what it uses, when it is called: by the modules that are imported, not by time."""

import json
import os
import subprocess
import sys
import typing

import pytest

from ctxflow.cli.app import MODULES, VERBS, load_verb
from waiting import patience

HEAVY = (
    "numpy", "scipy", "parsl", "torch", "pyarrow", "requests", "prometheus_client", "htcondor2", "kubernetes", "jinja2",
    "matplotlib", "asyncio", "rich.progress", "rich.live", "ctxflow.sites", "ctxflow.scheduler", "ctxflow.executors",
    "ctxflow.factory", "ctxflow.policies", "ctxflow.simulator", "ctxflow.planning", "ctxflow.observe", "ctxflow.models",
    "ctxflow.topology", "ctxflow.environments", "ctxflow.host",
)  # fmt: skip
"""What no help text needs."""

CALLS = [(), *((verb,) for verb in VERBS), ("env", "pack"), ("env", "check"), ("site", "check"), ("site", "show")]

# Each call in a fork of its own, so that what all of them import is imported once.
HELPS = """
import contextlib, io, json, os, sys
import typer
from ctxflow.cli.app import app
def show(words):
    sys.argv, text = ["ctxflow", *words, "--help"], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        app()
    return text
calls = json.loads(sys.argv[1])
show([])
for words in calls:
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    text = show(words)
    print(json.dumps([words, len(text.getvalue()), list(sys.modules)]), flush=True)
    os._exit(0)
"""


def _said(program, *words, **more):
    made = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, check=True, text=True, timeout=patience(), **more
    )
    return made.stdout


def _heavy(modules):
    return [name for name in modules if any(name == each or name.startswith(f"{each}.") for each in HEAVY)]


def test_a_help_text_imports_little():
    shown = [json.loads(line) for line in _said(HELPS, json.dumps(CALLS)).splitlines()]
    assert [tuple(words) for words, _, _ in shown] == CALLS
    assert all(length > 100 for _, length, _ in shown)
    assert {" ".join(words): _heavy(modules) for words, _, modules in shown if _heavy(modules)} == {}


def test_the_overview_and_completion_import_no_verb():
    program = (
        "import contextlib, sys\nsys.argv = ['ctxflow', *sys.argv[1:]]\n"
        "from ctxflow.cli.app import MODULES, app\n"
        "with contextlib.suppress(SystemExit): app()\n"
        "print([name for name in MODULES if f'ctxflow.cli.{name}' in sys.modules])"
    )
    assert _said(program, "--help").splitlines()[-1] == "[]"
    completing = {**os.environ, "_CTXFLOW_COMPLETE": "complete_bash", "COMP_WORDS": "ctxflow ", "COMP_CWORD": "1"}
    found = _said(program, env=completing).splitlines()
    assert found[-1] == "[]"
    assert set(VERBS) <= set(found)


@pytest.mark.parametrize("verb", VERBS)
def test_the_overview_says_what_each_verb_says_first(verb):
    assert " ".join(load_verb(verb).help.split("\n\n")[0].split()) == VERBS[verb]


def test_each_verb_is_in_one_module():
    assert sorted(verb for verbs in MODULES.values() for verb in verbs) == sorted(VERBS)


def test_a_batch_on_this_machine_imports_nothing_that_has_no_part_in_it(tmp_path):
    (tmp_path / "mine.py").write_text("def upper(text):\n    return [each.upper() for each in text]\n")
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    program = (
        "import sys\nfrom ctxflow.batch import ledger\nfrom ctxflow.cli import main\nbefore = ledger.Ledger.commit\n"
        "def commit(self, *given):\n"
        "    print(*sys.modules)\n"
        "    before(self, *given)\n"
        "ledger.Ledger.commit = commit\n"
        "sys.argv = 'ctxflow batch in.jsonl -o out.jsonl --function mine:upper --column text -q'.split()\nmain()\n"
    )
    modules = _said(program, cwd=tmp_path).split()
    needless = ("parsl", "prometheus_client", "ctxflow.factory.service", "asyncio", "torch")
    assert "ctxflow.batch.driver" in modules
    assert [name for name in needless if name in modules] == []


def test_what_help_texts_say_again_is_so():
    from ctxflow.cli import decision_commands, machine_commands, profile_scaling
    from ctxflow.policies.agh.solution import METHODS
    from ctxflow.simulator.scaling_profile import SHARES
    from ctxflow.topology.machine import GROUP_SIZE

    assert list(typing.get_args(decision_commands.SolutionMethod)) == list(METHODS)
    assert ",".join(map(str, SHARES)) == profile_scaling.SHARES
    assert machine_commands.CORES_OF_A_GROUP == GROUP_SIZE


def test_to_see_how_a_batch_stands_takes_no_scheduler():
    program = "import sys, ctxflow.batch.display, ctxflow.batch.job_status\nprint(*sys.modules)"
    rooms = ("ctxflow.scheduler", "ctxflow.sites", "ctxflow.factory", "ctxflow.models", "numpy", "pydantic")
    assert [name for name in _said(program).split() if name.startswith(rooms)] == []
