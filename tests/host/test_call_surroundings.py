"""Where a library process runs its calls."""

import io
import os
import sys

import pytest

from ctxflow.host.call_surroundings import FolderEach, Output


def test_a_folder_that_cannot_be_made_is_told_and_had_as_soon_as_there_is_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Goes back at the end.
    scratch = tmp_path / "scratch"
    scratch.write_text("in the way")
    each = FolderEach(str(scratch))
    with pytest.raises(OSError, match="the call got no directory to run in") as caught:
        each.enter()
    assert "put scratch= of the site on another disk" in str(caught.value)
    scratch.unlink()
    each.enter()
    assert os.getcwd().startswith(str(scratch))


def test_an_empty_folder_serves_the_next_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each, seen = FolderEach(str(tmp_path / "scratch")), []
    for mess in (False, True, False):
        each.enter()
        seen.append(os.getcwd())
        if mess:
            (tmp_path / seen[-1] / "left").touch()
        each.leave()
    assert seen[0] == seen[1] != seen[2]


def test_streams_that_a_call_has_closed_are_put_back_at_their_own_descriptors(monkeypatch, capfd):
    output = Output()
    with monkeypatch.context() as call:
        for name in ("stdout", "stderr"):
            stream = io.StringIO()
            stream.close()
            call.setattr(sys, name, stream)
        output.mend()
        assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
        print("as before", flush=True)
    os.close(output._spare)
    assert capfd.readouterr().out == "as before\n"
