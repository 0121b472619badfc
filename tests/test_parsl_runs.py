"""Whole runs of Parsl: checkpoints on disk that a later run reads, and monitoring."""

import sqlite3

import parsl
import pytest
from parsl.dataflow import memoization
from parsl.utils import get_all_checkpoints

from ctxflow import ContextExecutor, batch_app, context, context_app


@context
def base(value):
    return value


def note(base, n, path):
    with open(path, "a") as file:
        file.write("x\n")
    return base + n


@pytest.mark.parametrize("mode", ["task_exit", "dfk_exit"])
def test_checkpoints_are_read_by_a_later_run(tmp_path, mode):
    path, folder = tmp_path / "runs", str(tmp_path / "runinfo")
    app = context_app(base(1), cache=True)(note)
    for expected in (1, 1, 2):
        checkpoints = get_all_checkpoints(folder) if (tmp_path / "runinfo").exists() else None
        options = {"checkpoint_mode": mode, "checkpoint_files": checkpoints}
        if hasattr(memoization, "BasicMemoizer"):  # Of newer versions of Parsl.
            options = {"memoizer": memoization.BasicMemoizer(**options)}
        used = app if expected == 1 else app.using(base(2))
        with parsl.load(ContextExecutor.config(workers=1, run_dir=folder, **options)):
            assert used(5, str(path)).result() == 5 + expected
        assert len(path.read_text().splitlines()) == expected


def test_monitoring_records_the_tasks(tmp_path):
    pytest.importorskip("sqlalchemy", reason="Parsl's monitoring is not installed")
    from parsl.monitoring import MonitoringHub

    database = tmp_path / "monitoring.db"
    hub = MonitoringHub(logging_endpoint=f"sqlite:///{database}", resource_monitoring_interval=1)

    @batch_app(base(1))
    def add(base, numbers):
        return [base + n for n in numbers]

    app = context_app(base(1))(note)
    config = ContextExecutor.config(workers=1, run_dir=str(tmp_path / "runinfo"), monitoring=hub)
    with parsl.load(config):
        assert [app(n, str(tmp_path / "runs")).result() for n in range(3)] == [1, 2, 3]
        assert list(add.map(range(10))) == list(range(1, 11))
    with sqlite3.connect(database) as connection:
        names = [name for (name,) in connection.execute("select task_func_name from task order by task_id")]
        done = connection.execute("select count(*) from status where task_status_name = 'exec_done'").fetchone()[0]
    connection.close()
    assert names == ["note", "note", "note", "add"]
    assert done == 4
