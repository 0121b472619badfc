"""Names of earlier versions: each works, and says once what it is called now."""

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

from ctxflow import ContextExecutor, batch_app, context, renamed, session_app
from ctxflow.renamed import RENAMED, RenamedWarning


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(renamed, "_told", set())


def forget(module):
    """Have an old module imported anew, with what it was in."""
    for name in [each for each in sys.modules if isinstance(sys.modules[each], renamed._OldModule)]:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("old", RENAMED)
def test_every_old_name_works_and_is_told_once(old):
    if importlib.util.find_spec(RENAMED[old].partition(".")[0]) is None:
        pytest.skip("the papers' experiments are not installed")
    module, _, name = forget(old).partition(":")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            found = importlib.import_module(module)
            found = getattr(found, name) if name else found
    new = RENAMED[old]
    assert found is renamed.resolve(new) or isinstance(found, renamed._OldModule)
    [warning] = told
    assert warning.category is RenamedWarning and issubclass(RenamedWarning, DeprecationWarning)
    assert new.replace(":", ".") in str(warning.message)
    assert warning.filename == __file__, "the line that uses the old name"


def test_an_old_module_has_what_the_new_one_has():
    forget("")
    with pytest.warns(RenamedWarning, match=r"ctxflow\.turns is now ctxflow\.on_worker"):
        from ctxflow.turns import idle
    from ctxflow import on_worker

    assert idle is on_worker.idle
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from ctxflow.turns import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'ctxflow\.nowhere'"):
        importlib.import_module("ctxflow.nowhere")


def test_modules_below_an_old_package_and_names_of_one_that_is_gone(monkeypatch):
    forget("")
    monkeypatch.setitem(RENAMED, "ctxflow.guests", "ctxflow.host")
    monkeypatch.setitem(RENAMED, "ctxflow.gone.deep:Old", "ctxflow.errors:CallError")
    with pytest.warns(RenamedWarning) as told:
        from ctxflow.gone.deep import Old
        from ctxflow.guests.wire import Channel
    from ctxflow.errors import CallError
    from ctxflow.host import wire

    assert Channel is wire.Channel and Old is CallError
    assert [str(each.message) for each in told] == [
        "ctxflow.gone.deep.Old is now ctxflow.errors.CallError",
        "the module ctxflow.guests is now ctxflow.host",
        "the module ctxflow.guests.wire is now ctxflow.host.wire",
    ]


def test_names_that_have_left_a_module_that_is_still_there(monkeypatch):
    monkeypatch.setitem(RENAMED, "ctxflow.errors:Gone", "ctxflow.errors:CallError")
    find = renamed.names_of("ctxflow.errors")
    with pytest.warns(RenamedWarning, match=r"ctxflow\.errors\.Gone is now ctxflow\.errors\.CallError"):
        assert find("Gone") is renamed.resolve("ctxflow.errors:CallError")
    with pytest.raises(AttributeError, match=r"module 'ctxflow\.errors' has no attribute 'Never'"):
        find("Never")


def test_old_options_work_and_are_told_once():
    def build():
        return 1

    with pytest.warns(RenamedWarning, match="^environment= is now called env=$") as told:
        made = context(environment={"A": "1"})(build)
        assert made().env == {"A": "1"} == context(environment={"A": "1"})(build)().env
    assert [each.filename for each in told] == [__file__]
    with pytest.warns(RenamedWarning, match="environment= is now called env="):
        assert made.options(environment={"A": "2"})().env == {"A": "2"}
    with pytest.warns(RenamedWarning, match="a context's environment is now called env"):
        assert made().environment == {"A": "1"}
    with pytest.raises(TypeError, match="environment= is the old name of env=: give env= alone"):
        context(environment={}, env={})


def test_a_plain_program_is_told_once_wherever_the_old_name_stands(tmp_path):
    (tmp_path / "library.py").write_text("from ctxflow.turns import idle\nimport ctxflow.turns\n")
    (tmp_path / "program.py").write_text("import library\nfrom ctxflow.turns import last\nprint('ran')\n")
    run = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == "ran\n"
    assert run.stderr.count("Warning") == 1
    assert "library.py:1: RenamedWarning: the module ctxflow.turns is now ctxflow.on_worker" in run.stderr
    for option in ("-Wignore", "-Wignore::DeprecationWarning"):
        words = [sys.executable, option, "program.py"]
        assert not subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    words = [sys.executable, "-Werror::DeprecationWarning", "program.py"]
    assert "RenamedWarning" in subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False).stderr


def test_what_finds_old_names_is_asked_last_and_imports_nothing():
    program = "import sys, ctxflow; print(sys.meta_path[-1].__name__, 'ctxflow.renamed' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "_OldNames False\n"


def test_an_executor_takes_the_slowdowns_of_workers_as_before():
    with pytest.warns(RenamedWarning, match="slowdowns= is an option of the embedded engine now"):
        executor = ContextExecutor(slowdowns=[1, 2.5], workers=2)
    assert executor.resolved_site.embedded.slowdowns == (1, 2.5)
    assert executor.resolved_site.workers == 2 and "workers=2" in repr(executor)
    with pytest.raises(ValueError, match="slowdowns"):
        ContextExecutor(slowdowns=[0])


def test_options_make_variants_and_tell_what_was_chosen():
    @batch_app(None, priority=1)
    def double(numbers):
        return [2 * n for n in numbers]

    @session_app(ahead=4)
    def count(states, prompts):
        return [(1, 1) for _ in states]

    faster = double.options(priority=5, timeout=3)
    assert (faster.options.priority, faster.options.timeout, double.options.priority) == (5, 3, 1)
    assert faster.options == double.using(priority=5, timeout=3).options
    assert count.options(keep_every=2).options == count.using(keep_every=2).options
    assert count.options(keep_every=2).options.ahead == 4 and count.options.keep_every == 8
    with pytest.raises(TypeError, match="a session app has no option 'aheads': it takes chunk_target"):
        count.options(aheads=1)
    with pytest.raises(AttributeError):
        double.options.colour
