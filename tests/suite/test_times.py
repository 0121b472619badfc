"""What tests cost is measured, with the processes that they start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suite import starts, times
from suite.meter import Meter
from suite.shards import RECORDED

TESTS = Path(__file__).resolve().parents[1]
SUITE = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.5: pass"

@pytest.fixture
def dear():
    subprocess.run([sys.executable, "-c", BUSY], check=True)

def test_with_a_child(dear):
    subprocess.run([sys.executable, "-c", BUSY], check=True)

def test_without():
    pass
"""


def test_a_test_pays_for_its_processes_and_its_fixtures(tmp_path):
    (tmp_path / "test_small.py").write_text(SUITE)
    words = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "suite.times", "-p", "no:randomly"]
    given = {**os.environ, "PYTHONPATH": str(TESTS), starts.VARIABLE: ""}
    subprocess.run([*words, f"--junitxml={tmp_path}/run.xml", tmp_path], env=given, cwd=tmp_path, check=True)
    with_child, without = times.read([tmp_path / "run.xml"])
    assert with_child.cpu >= 1.0 > 0.5 > without.cpu
    (collection, _, _), (name, cpu, _) = with_child.fixtures
    assert (collection, name) == ("(collection)", "dear") and 0.5 <= cpu < with_child.cpu
    record = times.record_of([with_child, without])
    assert record.modules["test_small.py"] >= 1.0 and record.long == {"test_small.py": ["(dear)", "test_with_a_child"]}
    shown = times.table([with_child, without], [("import torch", 2, 3.5)])
    assert "import torch" in shown and "test_small::test_with_a_child" in shown and "fixture dear" in shown


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert times.show(tmp_path) == 2
    assert "run make test first" in capsys.readouterr().out


@pytest.mark.parametrize("depth", ["quick", "release"])
def test_only_an_ordinary_run_is_recorded(depth, tmp_path, capsys):
    recorded = RECORDED.read_bytes()
    case = '<testcase classname="tests.test_apps" name="test_a" time="1.0"/>'
    (tmp_path / "local.xml").write_text(f'<testsuites><testsuite name="{depth}">{case}</testsuite></testsuites>')
    assert times.show(tmp_path, record=True) == 2
    assert "Only an ordinary run is recorded" in capsys.readouterr().out
    assert RECORDED.read_bytes() == recorded


def test_orphans_count_where_control_groups_can_be_made():
    orphan = "import time\nwhile time.process_time() < 0.5: pass\nprint('done')"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    # The parent's output ends with the orphan's.
    program = (
        f"import subprocess, sys; sys.path.insert(0, {str(TESTS)!r}); from suite.meter import Meter\n"
        "meter = Meter()\n"
        f"subprocess.run([sys.executable, '-c', {parent!r}], check=True, stdout=subprocess.PIPE)\n"
        "print(meter.exact, meter.seconds()); meter.close()"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    if said[0] == "False":
        pytest.skip("no control groups here")
    assert float(said[1]) >= 0.5


def test_a_meter_without_control_groups_counts_what_was_waited_for(monkeypatch):
    monkeypatch.setattr("suite.meter._join", lambda name: (None, None))
    meter = Meter()
    before = meter.seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert not meter.exact and meter.seconds() - before >= 0.3


def test_processes_and_their_imports_are_counted(tmp_path):
    (tmp_path / "ctxflow_test_starts.py").write_text(Path(starts.__file__).read_text())
    program = "import ctxflow_test_starts as s; s.watch(); s.watch(); import pytest; import pytest"
    given = {**os.environ, "PYTHONPATH": str(tmp_path), starts.VARIABLE: str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env=given, check=True)
    counts = {name: count for name, count, _ in starts.totals(tmp_path)}
    assert counts == {"interpreter": 2, "import pytest": 2}
