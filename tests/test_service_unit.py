"""The systemd unit: it is one that systemd takes, and calls commands that there are."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from waiting import patience

UNIT = Path(__file__).parent.parent / "site-configs" / "ctxflow-factory@.service"


def test_systemd_takes_it(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    instance = tmp_path / "ctxflow-factory@lab.service"
    instance.write_text(UNIT.read_text().replace("%h/.local/bin/ctxflow", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(instance)],
        capture_output=True, check=False, text=True, timeout=patience(),
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if instance.name in line or str(instance) in line]
    assert done.returncode == 0 and complaints == []


def test_it_calls_commands_that_there_are():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    program, verb, site, options = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb, Path(site).name) == ("ctxflow", "factory", "%i.toml")
    assert service["Environment"] == options.removeprefix("$") + "="
    told = forked.run([sys.executable, "-m", "ctxflow", verb, "--help"], capture_output=True, check=True, text=True)
    assert "SITE" in told.stdout
    guide = (UNIT.parent.parent / "docs" / "factory.md").read_text()
    for option in set(re.findall(r"(?<=[ `])--[a-z-]+(?=[ `:,.])", guide)) - {"--user", "--now"}:
        assert option in told.stdout, f"docs/factory.md names {option}"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
