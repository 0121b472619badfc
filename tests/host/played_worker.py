"""Stands for the program vine_worker under its wrapper: notes what it was given, and starts the library as told."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from message_heads import frame
from vine_player import Player

from ctxflow.host.worker import HOST


def main():
    plan, arguments = json.loads(os.environ["PLAN"]), sys.argv[1:]
    workspace = arguments[arguments.index("--workspace") + 1]
    os.makedirs(workspace)
    time.sleep(0.1)  # A vine_worker has its workspace before it reads the password, and then goes there.
    password = (
        pathlib.Path(arguments[arguments.index("--password") + 1]).read_text() if "--password" in arguments else ""
    )
    os.chdir(workspace)
    subprocess.Popen(["sleep", "600"])  # As a vine_worker has its transfer server.
    left_behind = subprocess.Popen(["setsid", "sleep", "600"])
    found = {"arguments": arguments, "pid": os.getpid(), "left": left_behind.pid, "environment": dict(os.environ)}
    found["password"] = password
    with open(plan["notes"] + ".new", "w") as notes:
        json.dump(found, notes)
    os.rename(plan["notes"] + ".new", plan["notes"])
    if plan["do"] == "exit":
        sys.exit(plan["status"])
    if plan["do"] == "sleep":
        time.sleep(600)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    player = Player(
        workspace,
        ["/bin/sh", "-c", f'{HOST} vine_library "$@"', "sh"],
        {"CTXFLOW_WORKER_DIRECTORY": os.environ["CTXFLOW_WORKER_DIRECTORY"]},
    )
    player.message()
    listening = player.send(frame({"do": "listen"}))
    with open(plan["notes"] + ".listens", "w"):
        pass
    _, reports = player.answer(listening)
    assert reports == [({"is": "notice"}, b"")], reports
    call = player.call(lambda _, items: [os.environ.get("CUDA_VISIBLE_DEVICES")], [1])
    _, reports = player.answer(player.send(player.load(), *call))
    with open(plan["notes"] + ".devices", "wb") as notes:
        notes.write(reports[-1][1])
    player.answer(player.send(frame({"do": "release"})))
    time.sleep(600)


if __name__ == "__main__":
    main()
