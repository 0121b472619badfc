"""What a person calls: the command lines of testbed/up, run, host, status and down."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import cluster, faults, machine, root, tools
from .settings import CHECKOUT, SUBMIT, USERS, CannotBuild, Settings, TestbedError


def up(words: Sequence[str]) -> int:
    """`testbed/up`."""
    parser = argparse.ArgumentParser(
        prog="testbed/up",
        description="Bring up a real HTCondor pool and a Slurm cluster with TaskVine on this machine: a submit "
        "host, and execute hosts that advertise GPUs. The first time takes a minute or two, later ones seconds. "
        "Run again, it mends what is broken and installs what changed.",
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="execute hosts (default: 4)")
    parser.add_argument("--gpus", type=int, default=3, metavar="N", help="GPUs that each advertises (default: 3)")
    parser.add_argument(
        "--link", type=float, default=1000, metavar="MBIT", help="every host's link speed (default: 1000)"
    )
    parser.add_argument(
        "--far", type=int, default=0, metavar="N", help="the last N hosts are another region (default: 0)"
    )
    parser.add_argument(
        "--far-link", type=float, default=100, metavar="MBIT", help="the speed of the link to it (default: 100)"
    )
    parser.add_argument(
        "--static", action="store_true", help="static slots of one GPU, not one partitionable slot a host"
    )
    parser.add_argument("--numa", action="store_true", help="hosts of 8 GPUs of one model, 2 sockets and 8 NUMA nodes")
    parser.add_argument("--clocks", action="store_true", help="hosts with clocks of their own, which can be set")
    parser.add_argument(
        "--with-torch", action="store_true", help="with PyTorch, transformers and the example's packages"
    )
    parser.add_argument("--root-only", action="store_true", help="only build the root that the hosts run")
    parser.add_argument(
        "--check", action="store_true", help="only say whether a testbed can be built here (exit 3: no)"
    )
    asked = parser.parse_args(words)
    pool = (asked.hosts, asked.gpus, asked.link, asked.static, asked.numa, asked.far, asked.far_link, asked.clocks)
    settings = Settings(*pool)
    machine.check_root()
    lacking = tools.missing(to_build=root.find() is None)
    if asked.check:
        return _check(lacking)
    with machine.locked(machine.BUILDING):
        tools.install(lacking, root.log())
        machine.check()
        source = root.prepare(asked.with_torch)
    if asked.root_only:
        return 0
    with machine.locked():
        cluster.up(settings, source)
    sys.stderr.write("The testbed is up. Try: testbed/run condor_status\n")
    return 0


def _check(lacking: dict[str, str]) -> int:
    tools.check(lacking)
    if not lacking.keys() & tools.PACKAGES.keys():
        machine.check()
    if lacking:
        sys.stderr.write(f"A testbed can be built: testbed/up will install {', '.join(lacking)} first.\n")
    return 0


def down(words: Sequence[str]) -> int:
    """`testbed/down`."""
    parser = argparse.ArgumentParser(
        prog="testbed/down",
        description="End the testbed: no process, mount or namespace is left. The cached root stays.",
    )
    parser.parse_args(words)
    machine.check()
    with machine.locked():
        cluster.down()
    return 0


def host(words: Sequence[str]) -> int:
    """`testbed/host`."""
    parser = argparse.ArgumentParser(prog="testbed/host", description="Break a host, and mend it.")
    actions = parser.add_subparsers(dest="action", required=True)
    texts = {
        "kill": "take its power away: silence, then every process gone",
        "cut": "cut it off the network, while it goes on",
        "slow": "set its link to another speed",
        "fill": "have its scratch space be full",
        "clock": "set its clock, where the pool is up with --clocks",
        "limit": "have its queue take no more than so many jobs of a user at once",
        "restore": "bring it back: booted, on the network, at full speed, with its disk and the true time",
    }
    numbers = {
        "slow": ("MBIT", float, "Mbit/s, in each direction"),
        "clock": ("SECONDS", float, "how far it is ahead, or behind with -- before the sign"),
        "limit": ("JOBS", int, "how many"),
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("name", metavar="NAME", help="the host, such as host1")
        if name in numbers:
            metavar, kind, explained = numbers[name]
            action.add_argument("number", type=kind, metavar=metavar, help=explained)
    asked = parser.parse_args(words)
    machine.check()
    with machine.locked():
        settings = cluster.the_settings()
        able = {"limit": [SUBMIT], "cut": settings.names, "clock": settings.names, "restore": settings.names}
        if asked.name not in (hosts := able.get(asked.action, settings.execute_hosts)):
            raise TestbedError(f"{asked.action} is not for {asked.name}, but for {', '.join(hosts)}.")
        acts: dict[str, Callable[[], None]] = {
            "kill": lambda: cluster.kill(asked.name),
            "cut": lambda: cluster.cut(asked.name),
            "slow": lambda: cluster.slow(asked.name, asked.number),
            "fill": lambda: faults.fill(cluster.pid_of(asked.name)),
            "clock": lambda: faults.set_clock(cluster.pid_of(asked.name), asked.number, settings),
            "limit": lambda: faults.limit(cluster.pid_of(asked.name), asked.name, asked.number),
            "restore": lambda: cluster.restore(asked.name, settings),
        }
        acts[asked.action]()
    return 0


def run(words: Sequence[str]) -> int:
    """`testbed/run`; it becomes the command, and so ends with the command's exit code."""
    parser = argparse.ArgumentParser(
        prog="testbed/run",
        usage="testbed/run [--user USER] [--host NAME] [--directory DIR] CMD...",
        description="Run a command in the testbed: on the submit host, as alice. The checkout is /checkout "
        "there (read-only), /shared is seen by all hosts. From within the checkout, the command runs in the "
        "same directory there, else in the user's home.",
    )
    parser.add_argument("--user", default=USERS[0], choices=[*USERS, "root"], help="who runs it (default: alice)")
    parser.add_argument("--host", default=SUBMIT, metavar="NAME", help="on which host (default: submit)")
    parser.add_argument(
        "--directory", default="", metavar="DIR", help="where, inside the testbed (default: as said, or home)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD", help="the command and its arguments")
    asked = parser.parse_args(words)
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if not command:
        parser.error("name a command to run, for example: testbed/run condor_status")
    machine.check_root()
    cluster.the_settings()
    arguments = cluster.command_on(asked.host, asked.user, asked.directory or _directory_inside(), command)
    os.execvp(arguments[0], arguments)


def _directory_inside() -> str:
    here = Path.cwd()
    return str(Path("/checkout") / here.relative_to(CHECKOUT)) if here.is_relative_to(CHECKOUT) else ""


def status(words: Sequence[str]) -> int:
    """`testbed/status`."""
    parser = argparse.ArgumentParser(
        prog="testbed/status", description="Show the testbed's hosts, links, GPUs and slots."
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    asked = parser.parse_args(words)
    machine.check_root()
    state = cluster.state()
    sys.stdout.write(json.dumps(state, indent=2) + "\n" if asked.json else _table(state))
    return 0


def _table(state: dict[str, Any]) -> str:
    rows = [("HOST", "STATE", "ADDRESS", "MBIT/S", "SENT MB", "RECEIVED MB", "CLAIMED", "SLURM", "GPUS")]
    for name, its in state["hosts"].items():
        claimed = sum(slot["state"] == "Claimed" and slot["type"] != "Partitionable" for slot in its["slots"])
        speed = "-" if its["mbit"] is None else f"{its['mbit']:g}"
        megabytes = (f"{its[key] / 1e6:.1f}" for key in ("bytes_sent", "bytes_received"))
        rows.append(
            (
                name,
                its["state"],
                its["address"],
                speed,
                *megabytes,
                str(claimed),
                its["slurm"] or "-",
                ", ".join(its["gpus"]) or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def main(command: Callable[[Sequence[str]], int]) -> None:
    """Run one of the commands above for a person: trouble is one sentence, the exit code says what kind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code = command(sys.argv[1:])
    except TestbedError as error:
        sys.stderr.write(f"testbed: {error}\n")
        code = 3 if isinstance(error, CannotBuild) else 1
    except KeyboardInterrupt:
        sys.stderr.write("\ntestbed: interrupted.\n")
        code = 130
    sys.exit(code)
