"""The pool as a whole: up, down, one host at a time, and what state it is in."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import faults, machine, network, root, slurm
from .condor import configuration, slots
from .gpus import cards, gpus_of, inventory, speeds, topology
from .machine import SWITCH, enter, run, until
from .progress import step
from .settings import (
    CHECKOUT,
    DOMAIN,
    NAME,
    ROOT,
    STATE,
    SUBMIT,
    TESTBED,
    Settings,
    TestbedError,
    address,
    cache,
    load,
    save,
)

PATH_INSIDE = "/opt/ctxflow/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def up(settings: Settings, source: Path) -> None:
    """Bring the pool up as asked: what runs as asked already is kept, what differs or is broken is replaced.

    :param source: the root that its hosts run.

    :raises TestbedError: it could not be brought up; nothing is left running, but a pool that ran before.
    """
    wanted = (settings, str(CHECKOUT), str(source))
    running, before = dict(machine.inits()), load()
    if running and (before != wanted or SWITCH not in running or SUBMIT not in running):
        whose = before[1] if before else "a run that was cut off"
        sys.stderr.write(f"Ending the testbed of {whose} first, which was set up otherwise.\n")
        down()
    root.prune(source)
    ran = bool(machine.inits())
    try:
        if not machine.inits():
            _lay_out(settings)
            _boot(SWITCH, [str(source)], [])
            if settings.far:
                network.span(_switch(), settings.far_mbit)
            save(settings, source)
        with step(f"Starting {settings.hosts} execute hosts and the submit host"):
            for name in settings.names:
                restore(name, settings)
            _wait_until_ready(settings)
    except BaseException:
        _keep_logs()
        if not ran:
            down()
        raise


def down() -> None:
    """End everything that belongs to a testbed on this machine, also of one that was cut off.

    Nothing is left: all mounts, bridges and namespaces live inside the pool's own namespaces, and go with
    their first processes.
    """
    machine.kill([pid for name, pid in machine.inits() if name == SWITCH])
    machine.kill([pid for _, pid in machine.inits()])
    if STATE.exists():
        with contextlib.suppress(FileNotFoundError):
            ROOT.rmdir()  # never by rmtree: were a root still mounted here, this refuses
        shutil.rmtree(STATE)


def restore(name: str, settings: Settings) -> None:
    """Bring a host back as declared: booted if it is dead, on the bridge, at full speed, with its daemons."""
    switch, pid = _switch(), machine.find(name)
    if pid is None:
        _boot(name, [str(settings.disk_gb), str(CHECKOUT)], enter(switch, "mount", "pid"))
        pid = pid_of(name)
        network.connect(switch, name, pid, settings.link_mbit, name in settings.far_hosts)
    else:
        network.join(switch, name, name in settings.far_hosts)
        network.slow(switch, name, pid, settings.link_mbit)
    faults.mend(pid, name, settings)
    with_clock = ["env", *_variables(faults.clock(settings))]
    run([*enter(pid), *with_clock, "bash", "-c", "grep -qsx condor_master /proc/[0-9]*/comm || condor_master"])
    run([*enter(pid), "bash", "-c", slurm.START, slurm.daemon(name)])


def kill(name: str) -> None:
    """Take a host's power away: its packets stop, so that nobody hears a farewell, then its processes."""
    network.cut(_switch(), name)
    machine.kill([pid_of(name)])


def cut(name: str) -> None:
    """Cut a host off the network; it goes on alone."""
    pid_of(name)
    network.cut(_switch(), name)


def slow(name: str, mbit: float) -> None:
    """Set a host's link to another speed, in Mbit/s."""
    network.slow(_switch(), name, pid_of(name), mbit)


def the_settings() -> Settings:
    """The settings of the pool that runs.

    :raises TestbedError: none runs.
    """
    found = load()
    if found is None or machine.find(SUBMIT) is None:
        raise TestbedError("No testbed is up: start one with testbed/up.")
    return found[0]


def state() -> dict[str, Any]:
    """The pool as data: its settings and every host's state, address, link, GPUs and slots."""
    settings = the_settings()
    links, gpus, running = network.links(_switch()), gpus_of(settings), dict(machine.inits())
    words = ["condor_status", "-af", "Machine", "Name", "SlotType", "State", "RemoteOwner"]
    found = [line.split() for line in run([*enter(running[SUBMIT]), *words], check=False).stdout.splitlines()]
    nodes = slurm.nodes(enter(running[SUBMIT]))
    hosts = {}
    for name in settings.names:
        link = links.get(name, {"cut": True, "mbit": None, "sent": 0, "received": 0})
        up_or_not = "dead" if name not in running else "cut" if link["cut"] else "up"
        if up_or_not == "up" and link["mbit"] != settings.link_mbit:
            up_or_not = "slow"
        mine = [line for line in found if line[0] == f"{name}.{DOMAIN}"]
        hosts[name] = {
            "state": up_or_not, "address": address(name), "mbit": link["mbit"], "bytes_sent": link["sent"],
            "bytes_received": link["received"], "gpus": [gpu.model.name for gpu in gpus.get(name, [])],
            "slots": [dict(zip(("name", "type", "state", "owner"), line[1:], strict=False)) for line in mine],
            "slurm": nodes.get(name),
        }  # fmt: skip
    return {
        "hosts": hosts,
        "far": links.get(network.SPAN),
        "static": settings.static,
        "numa": settings.numa,
        "shared": str(STATE / "shared"),
    }


def command_on(host: str, user: str, directory: str, command: list[str]) -> list[str]:
    """The words that run a command on a host as a user, in a directory, with a login's environment."""
    home = "/root" if user == "root" else f"/home/{user}"
    environment = {
        "HOME": home, "USER": user, "LOGNAME": user, "PATH": PATH_INSIDE, "LANG": "C.UTF-8",
        "SHELL": "/bin/bash", "TERM": os.environ.get("TERM", "dumb"), "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis", **faults.clock(the_settings()),
        **{name: os.environ[name] for name in ("CTXFLOW_TEST_PATIENCE",) if name in os.environ},
    }  # fmt: skip
    # The death signal: a command whose `testbed/run` is killed is asked to end too.
    identity = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "--pdeathsig", "TERM"]
    settings = _variables(environment)
    return [*enter(pid_of(host)), *identity, "env", "-i", f"--chdir={directory or home}", *settings, *command]


def _variables(environment: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in environment.items()]


def _lay_out(settings: Settings) -> None:
    """Write what the hosts will read when they boot."""
    if STATE.exists():
        down()
    for folder in (ROOT, STATE / "shared"):
        folder.mkdir(parents=True)
    (STATE / "shared").chmod(0o1777)
    password = STATE / "password"
    password.touch(0o600)
    password.write_text(secrets.token_hex(32))
    table = [f"{address(name)} {name}.{DOMAIN} {name}" for name in settings.names]
    (STATE / "hosts.txt").write_text("\n".join(["127.0.0.1 localhost", *table]) + "\n")
    (STATE / "slurm").mkdir()
    for path, text in slurm.configuration(settings).items():
        (STATE / "slurm" / path).write_text(text)
    key = STATE / "slurm" / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    gpus = gpus_of(settings)
    for name in settings.names:
        mine = gpus.get(name, [])
        files = {
            "config.d/testbed": configuration(name, settings),
            "gpus": inventory(mine),
            "speeds": speeds(mine),
        }
        if mine:
            files["cards"] = cards(mine)
        if settings.numa and mine:
            files |= {f"topology/{path}": text for path, text in topology(mine).items()}
        for path, text in files.items():
            target = STATE / "hosts" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def _boot(name: str, words: list[str], inside: list[str]) -> None:
    """Start a host's first process in namespaces of its own, detached from us, and wait until it stands."""
    kind = [SWITCH] if name == SWITCH else ["host", name]
    spaces = ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", str(TESTBED / "boot")]
    log = STATE / f"{name}.log"
    # The shell in between ends at once, so that the host is a child of nobody here.
    detached = [*inside, "setsid", "sh", "-c", 'exec "$@" & :', "sh", *spaces, *kind, *words]
    with log.open("wb") as out:
        subprocess.run(detached, check=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=30)

    def stands() -> bool:
        complaint = log.read_text(errors="replace").strip()
        if complaint:
            raise TestbedError(f"{name} did not boot: {complaint.splitlines()[-1]}.")
        return machine.find(name) is not None

    until(stands, 20, f"{name} did not boot")


def _wait_until_ready(settings: Settings) -> None:
    """Wait until HTCondor lists every slot and takes jobs, and give bob the machines' owner's priority."""
    submit = enter(pid_of(SUBMIT))
    whole = 'SlotType =!= "Dynamic" && isUndefined(SlotBrokenCode)'

    def answers(*command: str) -> bool:
        return run([*submit, *command], check=False).returncode == 0

    def listed() -> bool:
        answer = run([*submit, "condor_status", "-const", whole, "-af", "Name"], check=False)
        return len(answer.stdout.split()) == slots(settings)

    until(listed, 60, f"HTCondor did not list its {slots(settings)} slots (logs: {_kept_logs()})", 0.3)
    until(lambda: answers("condor_q"), 30, f"HTCondor's queue did not answer (logs: {_kept_logs()})", 0.3)
    factor = ("condor_userprio", "-setfactor", f"bob@{DOMAIN}", "1")
    until(lambda: answers(*factor), 30, f"HTCondor's negotiator did not answer (logs: {_kept_logs()})", 0.3)

    def usable() -> bool:
        states = slurm.nodes(submit)
        for name, state in states.items():
            if "down" in state.lower():  # The submit host was cut off; by itself Slurm takes many minutes to return.
                run([*submit, "scontrol", "update", f"NodeName={name}", "State=RESUME"], check=False)
        return [name for name, state in states.items() if not slurm.UNUSABLE.search(state)] == settings.execute_hosts

    until(usable, 60, f"Slurm did not list its {settings.hosts} nodes (logs: {_kept_logs()})", 0.3)


def _kept_logs() -> Path:
    return cache() / f"failed-{NAME}"


def _keep_logs() -> None:
    """Save the hosts' logs, which end with the hosts, before a pool that did not come up is taken down."""
    shutil.rmtree(_kept_logs(), ignore_errors=True)
    for name, pid in machine.inits():
        logs = Path(f"/proc/{pid}/root/var/log")
        for log in (*logs.glob("condor/*Log"), *logs.glob("slurm/*.log")):
            (_kept_logs() / name).mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                shutil.copyfile(log, _kept_logs() / name / log.name)


def _switch() -> int:
    return pid_of(SWITCH)


def pid_of(name: str) -> int:
    """A host's first process.

    :raises TestbedError: it does not run.
    """
    pid = machine.find(name)
    if pid is None:
        found = load()
        if found and name in found[0].names:
            raise TestbedError(f"{name} is dead: bring it back with testbed/host restore {name}.")
        known = f" Its hosts are {', '.join(found[0].names)}." if found else " Start one with testbed/up."
        raise TestbedError(f"The testbed has no host {name}.{known}")
    return pid
