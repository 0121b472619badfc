"""Whatever the verb: 2 where another command line mends it, 1 where it does not."""

import re
import sys
from pathlib import Path

import pytest
from in_process import ctxflow

from ctxflow.cli import main

SITE = Path(__file__).parents[2] / "site-configs" / "local.toml"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("report nope", 2, "there is no directory nope: name a run's directory"),
        ("report", 2, "no run below ./runs"),
        ("report .", 2, ". holds no run"),
        ("report . page.html", 2, "page.html is one argument too many"),
        ("report . --html --json", 2, "leave --json and --output out, or --html"),
        ("status nope", 2, "nope has no status"),
        ("clean nope", 2, "there is no folder nope"),
        ("site check nope.toml", 2, "there is no site 'nope.toml'"),
        ("site show .", 2, ". is a folder: give"),
        ("site check wrong.toml", 1, ""),
        ("site show wrong.toml", 1, "wrong.toml, line 1: "),
        ("factory nope.toml --dry-run", 2, "there is no site 'nope.toml'"),
        ("plan nope.toml job.toml", 2, "there is no site 'nope.toml'"),
        ("simulate local nope.toml", 2, "there is no workload 'nope.toml'"),
        ("simulate local nope.toml --set workers", 2, "'workers' changes nothing: write KEY=VALUE"),
        ("simulate local nope.toml --sweep workers=", 2, "is no sweep"),
        ("topo --file machines.ads --classad", 2, "--classad is for one machine's ad: the file has several"),
    ],
)
def test_exit_statuses(tmp_path, monkeypatch, capsys, words, status, said):
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text("nonsense = 1\n")
    Path("job.toml").write_text("")
    Path("machines.ads").write_text('Machine = "a"\n\nMachine = "b"\n')
    monkeypatch.setattr(sys, "argv", ["ctxflow", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert (ended.value.code, said in told) == (status, True), told


HOSTILE = "bad\nname \x1b[2J\x9b5n\u202e" + 5000 * "x"


@pytest.mark.parametrize(
    "words",
    [
        "report {}", "status {}", "clean {}", "site check {}", "site show {}", "factory {} --dry-run",
        "plan {} job.toml", "plan local {}", "plan --problem {}", "simulate local {}",
        "simulate local nope.toml --set {}",
        "simulate local nope.toml --sweep {}", "topo --file {}", "preempt {}", "reproduce {}", "drain {}", "workers {}",
        "worker-command {}", "logs {}", "cancel {}", "env pack {}", "cache {}", "league {}", "league routing -p {}",
        "batch {} -o out.jsonl --function a:b", "batch in.csv -o {} --function a:b",
        "batch in.csv -o o.jsonl --model {}",
        "batch in.csv -o o.jsonl --function {}", "batch in.csv -o o.jsonl --model m --column {}",
        "batch in.csv -o o.jsonl --function a:b --site {}",
        "batch in.csv -o o.jsonl --model m --id-column {}", "batch in.csv -o o.jsonl --function a:b --set {}",
        "batch --job {}", "batch in.csv -o o.jsonl --model m --max-errors {}", "batch in.csv -o o.jsonl --delimiter {}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("hostile", [HOSTILE, HOSTILE[:20]], ids=["long", "short"])
def test_what_is_quoted_neither_commands_a_terminal_nor_takes_another_line(tmp_path, words, hostile):
    (tmp_path / "in.csv").write_text("id,text\na,b\n")
    (tmp_path / "job.toml").write_text("")
    done = ctxflow(*(each.replace("{}", hostile) for each in words.split()), cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2) and said and "Traceback" not in said
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]", said), said
    if "Usage:" not in said:  # Of what typer refuses there is a box of lines.
        for line in done.stderr.splitlines():
            assert re.match(r"([0-9:]{8} )?ctxflow: |  - ", line) and len(line) < 2100, line
