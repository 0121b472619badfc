"""`ctxflow profile-scaling` as a person meets it."""

import json

import pytest
from typer.testing import CliRunner

from ctxflow.cli.app import app
from ctxflow.sites import load_site
from ctxflow.sites.site_problems import parse

SITE = 'engine = "taskvine"\n[[tiers]]\nname = "a"\nworkers = 9\ngpus = 0\nprovider = "condor"\nboot_seconds = 10\n'
WORKLOAD = "[[apps]]\narrivals = [[0, 200], [900, 20]]\nitem_seconds = 0.5\n[[contexts]]\ngpus = 0\n"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "work.toml").write_text(WORKLOAD)
    return [str(tmp_path / "site.toml"), str(tmp_path / "work.toml")]


def command(*words):
    return CliRunner().invoke(app, ["profile-scaling", *words])


def test_the_line_it_prints_is_one_for_a_site_file(files):
    done = command(*files, "--target", "300", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["windows"]) == 2
    assert all(row["target_kept"] for row in found["windows"])
    site = load_site(files[0], **parse(found["line"]))
    assert site.scaling["policy"] == "closed-loop"


def test_a_target_out_of_reach_is_told(files):
    done = command(*files, "--target", "1", "--shares", "0.5,0.8")
    assert done.exit_code == 1
    told = (
        "In 2 of 2 windows no share keeps the target, and the share that exceeds it least was taken: give the site more"
    )
    assert told in " ".join(done.stdout.split())
    assert "(too long)" in done.stdout
    data = json.loads(command(*files, "--target", "1", "--shares", "0.5,0.8", "--json").stdout)
    assert all(row["seconds_over"] > 0 for row in data["windows"])


@pytest.mark.parametrize("shares", ["", "a", "0.5,,", "0,1"])
def test_shares_have_to_be_numbers(files, shares):
    done = command(*files, "--shares", shares)
    assert done.exit_code == 2
    assert "list of numbers" in done.stderr


def test_help_teaches():
    assert "It prints the line for the site file" in command("--help").stdout


def test_a_run_of_sessions_is_profiled_by_its_chunks(tmp_path):
    tier = {"is": "TierSpec", "name": "t", "maximum": 4, "boot_seconds": None}
    outcomes = [{"made": 1}]
    events = [
        {"is": "TierOffered", "time": 0.0, "tier": tier},
        {"is": "SessionOpened", "time": 1.0, "session": 1},
        {"is": "StepFinished", "time": 2.0, "seconds": 0.2, "outcomes": outcomes},
        {"is": "SessionClosed", "time": 50.0, "session": 1},
    ]
    lines = [json.dumps({"event": event, "commands": []}) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(['{"run":{}}', *lines]) + "\n")
    done = command(str(tmp_path), "--target", "0.5")
    assert done.exit_code == 0, done.output
    assert "chunks within 0.5 s" in done.stdout and 'policy = "closed-loop"' in done.stdout
    changed = command(str(tmp_path), "--set", "workers=2")
    assert changed.exit_code == 2 and "and this run had" in " ".join(changed.stderr.split())
