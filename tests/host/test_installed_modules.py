"""Which modules are of installed packages, and what is in their way."""

import sys

from ctxflow.host.installed_modules import imported_modules, is_installed, shadowing


def test_the_standard_library_is_installed_and_a_project_is_not(tmp_path):
    import json

    import numpy

    for module in (json, numpy):
        assert is_installed(module.__file__.rpartition("/")[0])
    assert not is_installed(str(tmp_path)) and not is_installed("")


def test_modules_come_in_the_order_of_their_imports(monkeypatch):
    before = frozenset(sys.modules)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wave", "email")]:
        monkeypatch.delitem(sys.modules, name)
    import email.charset
    import wave

    assert imported_modules(before - {"email", "email.charset", "wave"})[:1] == ["email"]
    assert {"email.charset", "wave"} <= set(imported_modules(before - {"email", "email.charset", "wave"}))
    assert email.charset and wave


def test_modules_that_nobody_can_import_again_are_left_out(monkeypatch, tmp_path):
    import types

    before = frozenset(sys.modules)
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    monkeypatch.setitem(sys.modules, "no_module", object())
    assert imported_modules(before) == []


def test_what_the_user_has_before_packages_shadows_them(tmp_path):
    import numpy

    assert numpy
    for name in ("numpy.txt", "other.py"):
        (tmp_path / name).write_text("")
    site = "/usr/lib/python3/site-packages"
    assert shadowing([str(tmp_path), site], ()) == ""
    (tmp_path / "numpy").mkdir()
    assert shadowing([str(tmp_path), site], ()) == f"{tmp_path}/numpy"
    assert shadowing([str(tmp_path), site], {"numpy"}) == ""  # Any process has it before it looks.
    assert shadowing([site, str(tmp_path)], ()) == ""
