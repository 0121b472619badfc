"""What a library process finds in its environment."""

import os
import site

import pytest

from ctxflow import ContextExecutor, context, context_app
from ctxflow.host.linux import python_path, restore_python_path


@pytest.mark.parametrize("given", [None, "/somewhere", "relative:/else"])
def test_the_users_code_finds_the_python_path_that_the_driver_had(monkeypatch, tmp_path, given):
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)

    def look():
        import os
        import subprocess
        import sys

        script = "import os; print(os.environ.get('PYTHONPATH'), end='')"
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        return os.environ.get("PYTHONPATH"), child, [name for name in os.environ if "ORIGINAL" in name]

    @context(env={"PYTHONPATH": "/of/the/recipe"})
    def own():
        return None

    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        assert context_app(look)().result() == (given, str(given), [])
        found = context_app(own())(lambda _: look()[0])().result()
    assert found == "/of/the/recipe"


def test_an_installed_package_needs_no_path(monkeypatch):
    monkeypatch.setattr(site, "getsitepackages", list)
    assert python_path({"PYTHONPATH": "/a"})["PYTHONPATH"].startswith("/a" + os.pathsep)
    source = python_path({"PYTHONPATH": ""})["PYTHONPATH"]
    monkeypatch.setattr(site, "getsitepackages", lambda: [source])
    assert python_path() == {}
    before = dict(os.environ)
    restore_python_path()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("drivers", "recipe", "expected"),
    [
        ({}, {}, ("1", "1", "1", "1", "0")),
        ({"VLLM_NO_USAGE_STATS": "0"}, {}, (None, "0", "1", "1", "0")),
        ({}, {"HF_HUB_DISABLE_TELEMETRY": "false"}, (None, "1", "false", "1", "0")),
        ({"RAY_USAGE_STATS_ENABLED": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}, {}, (None, "1", "1", "1", "1")),
        ({"DO_NOT_TRACK": "0"}, {}, ("0", None, None, None, None)),
        ({"DO_NOT_TRACK": "1"}, {}, ("1", "1", "1", "1", "0")),
    ],
)
def test_libraries_report_nothing_of_a_worker_unless_the_user_said_so(monkeypatch, tmp_path, drivers, recipe, expected):
    names = [
        "DO_NOT_TRACK",
        "VLLM_NO_USAGE_STATS",
        "HF_HUB_DISABLE_TELEMETRY",
        "TRTLLM_NO_USAGE_STATS",
        "RAY_USAGE_STATS_ENABLED",
    ]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in drivers.items():
        monkeypatch.setenv(name, value)

    @context(env=recipe)
    def here():
        import os

        return tuple(os.environ.get(name) for name in names)

    executor = ContextExecutor(workers=1)
    executor.run_dir = str(tmp_path)
    with executor:
        assert context_app(here())(lambda found: found)().result() == expected
