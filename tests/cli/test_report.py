"""`ctxflow report` as a person meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import ctxflow

from ctxflow.installing import how_to_install
from waiting import patience

RUN = Path(__file__).parents[1] / "observe" / "data" / "tree"


def command(*arguments, program=None, **options):
    """Run the command, with a program given in an interpreter of its own."""
    if program is None:
        return ctxflow("report", *arguments, **options)
    line = [sys.executable, *program, "report", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, check=False, text=True, timeout=patience(), **options)


@pytest.fixture
def run_directory(tmp_path):
    return Path(shutil.copytree(RUN, tmp_path / "runinfo" / "000" / "ctxflow"))


def test_text_and_pictures_beside_the_run(run_directory, tmp_path):
    pytest.importorskip("matplotlib")
    done = command(cwd=tmp_path)  # The latest below ./runinfo.
    assert (done.returncode, done.stderr) == (0, "")
    assert "Items     600 of 600 done; 50 ran again after an eviction or a failure" in done.stdout
    assert "22 joined on 1 host, 20 evicted\n" in done.stdout
    assert "Efficiency  62 % of the fluid bound" in done.stdout
    assert "└─ 11.0.w1a (host1)  1.62-2.42 s, 100.0 MB at 125.0 MB/s" in done.stdout
    assert "Evicted after  count  a worker-hour     p10     p50     p90  longest\nlocal             20" in done.stdout
    for name in ("transfers", "workers_and_items", "call_times", "lifetimes"):
        assert (run_directory / f"{name}.png").stat().st_size > 5000


def test_json_draws_only_when_told_where(run_directory, tmp_path):
    pytest.importorskip("matplotlib")
    done = command(run_directory.parents[1], "--json", cwd=tmp_path)
    data = json.loads(done.stdout)
    assert data["history"]["items"]["done"] == 600
    hours = data["summary"]["hours"]
    assert sum(hours[part] for part in hours if part != "connected") == pytest.approx(hours["connected"])
    assert (data["causes"], data["batch"]) == ([], None)
    [app] = data["history"]["apps"].values()
    assert app["call_seconds"]["p50"] > 0
    assert [tree["copies"] for tree in data["trees"]] == [5, 4, 3]
    assert len(data["transfers"]) == 21
    tier = data["history"]["tiers"]["local"]
    assert (tier["evicted"], tier["unexplained"], tier["lifetimes"]["count"], len(tier["survival"])) == (20, 0, 20, 20)
    assert not list(run_directory.glob("*.png"))
    done = command(run_directory, "--json", "--output", tmp_path / "out", "--format", "svg")
    assert json.loads(done.stdout) == data | {"run": str(run_directory)}
    assert len(list((tmp_path / "out").glob("*.svg"))) == 4


def test_without_matplotlib_the_text_is_there(run_directory):
    program = "import sys; sys.modules['matplotlib'] = None; from ctxflow.cli import main; main()"
    done = command(run_directory, program=("-c", program))
    assert done.returncode == 0
    assert "600 of 600 done" in done.stdout
    assert done.stderr == f"ctxflow: pictures need matplotlib: {how_to_install('matplotlib', extra='report')}\n"


def test_matplotlib_is_not_imported_for_text(run_directory):
    program = "import sys; sys.modules['matplotlib'] = None; from ctxflow.cli import main; main()"
    done = command(run_directory, "--no-pictures", program=("-c", program))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Pictures" not in done.stdout


def test_a_plain_terminal(run_directory):
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    done = command(run_directory, "--no-pictures", program=("-m", "ctxflow"), env=environment)
    assert done.returncode == 0
    assert "`- 11.0.w1a (host1)" in done.stdout


def test_a_run_without_an_event_log(run_directory):
    (run_directory / "events.jsonl").unlink()
    done = command(run_directory, "--no-pictures")
    assert done.returncode == 0
    assert "Its event log was not written" in done.stdout
    assert "manager" in done.stdout


def test_errors_are_one_sentence(run_directory, tmp_path):
    (tmp_path / "empty").mkdir()
    none = command(cwd=tmp_path / "empty")
    assert none.stderr == (
        "ctxflow: no run below ./runs, ./runinfo or ./.demo: name a run's directory, as in `ctxflow report DIR`\n"
    )
    missing = command(tmp_path / "nowhere")
    assert "there is no directory" in missing.stderr
    empty = command(tmp_path / "empty")
    assert "holds no run" in empty.stderr
    shutil.copytree(run_directory, run_directory.parents[1] / "001" / "ctxflow")
    several = command(tmp_path / "runinfo")
    assert "holds 2 runs: name one of them (the latest is " in several.stderr
    (run_directory / "events.jsonl").write_text("not an\nevent log\n")
    wrong = command(run_directory)
    assert "line 1 is no line of an event log" in wrong.stderr
    for done in (none, missing, empty, several, wrong):
        assert done.returncode == (1 if done is wrong else 2)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1


def test_a_page_beside_the_run_or_where_it_is_wanted(run_directory, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    done = command(run_directory, "--html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{run_directory / 'report.html'}\n"
    page = (run_directory / "report.html").read_text()
    assert "11.0.w1a (host1)" in page
    assert page.count("<svg") == 8
    done = command(run_directory, "--html", "new/night.html", "--no-pictures", cwd=tmp_path)
    assert done.stdout == "new/night.html\n"
    assert "<svg" not in (tmp_path / "new" / "night.html").read_text()
    done = command("--html", "latest.html", "--no-pictures", cwd=tmp_path)  # Of the latest run.
    assert (done.returncode, (tmp_path / "latest.html").is_file()) == (0, True)


def test_a_page_needs_jinja2_and_may_lack_pictures(run_directory):
    pytest.importorskip("jinja2")
    program = "import sys; sys.modules['matplotlib'] = None; from ctxflow.cli import main; main()"
    done = command(run_directory, "--html", program=("-c", program))
    assert done.returncode == 0
    assert done.stderr == f"ctxflow: pictures need matplotlib: {how_to_install('matplotlib', extra='report')}\n"
    assert "600" in (run_directory / "report.html").read_text()
    program = "import sys; sys.modules['jinja2'] = None; from ctxflow.cli import main; main()"
    done = command(run_directory, "--html", "--no-pictures", program=("-c", program))
    assert (done.returncode, done.stderr) == (
        1,
        f"ctxflow: a page needs jinja2: {how_to_install('jinja2', extra='report')}\n",
    )


def test_what_does_not_go_together(run_directory):
    for options in ((run_directory, "page.html"), (run_directory, "--html", "--json")):
        done = command(*options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_help_teaches():
    done = command("--help")
    assert done.returncode == 0
    for word in ("runinfo", "--json", "--html", "--format", "workers_and_items", "call_times", "lifetimes"):
        assert word in done.stdout


def test_the_demos_run_is_found(tmp_path):
    shutil.copytree(RUN, tmp_path / ".demo" / "runs" / "000" / "ctxflow")
    done = command("--no-pictures", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ".demo/runs/000/ctxflow" in done.stdout
