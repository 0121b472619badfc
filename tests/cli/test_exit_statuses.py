"""Whatever the verb: 2 where another command line mends it, 1 where it does not."""

import sys
from pathlib import Path

import pytest

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
