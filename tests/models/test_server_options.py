"""What a server's program tells of its options, asked of a module as `python -m` starts it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ctxflow.errors import UsageError
from ctxflow.models.server_command import read_command
from ctxflow.models.server_options import check_options

MODULE = "vllm.entrypoints.openai.api_server"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A module of vLLM's name, which notes how it was asked for its help; the file with the notes."""
    notes = tmp_path / "asked"
    folder = tmp_path / Path(*MODULE.split(".")).parent
    folder.mkdir(parents=True)
    (folder / "api_server.py").write_text(f"""
import sys
with open({str(notes)!r}, "a") as file:
    print(*sys.argv[1:], file=file)
print("  --max-model-len N\\n  --dtype {{float32,auto}}, -d X\\n  --uds PATH\\n  --model PATH")
print("  --disable-uvicorn-access-log\\n  --enable-prompt-tokens-details")
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return notes


def test_a_module_is_asked_once_and_what_names_it_is_no_option(asked):
    told = []
    for model in ("small", "large"):
        command = read_command(f"{sys.executable} -m {MODULE} --dtype float32", model=model)
        check_options(command, told.append)
    assert asked.read_text().split() == ["--help=all"]
    assert told == ["asking vllm which options it has, while workers are asked for"]
    with pytest.raises(UsageError, match=r"vllm has no option --max-modle-len: did you mean --max-model-len?"):
        check_options(read_command(f"{sys.executable} -m {MODULE} --max-modle-len 3", model="small"))
