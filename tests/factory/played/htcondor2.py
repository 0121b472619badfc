"""What stands for HTCondor's bindings, in the process that holds them: a queue in a file, which hangs as it is told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

STATE = Path(os.environ["PLAYED_HTCONDOR"])
if STATE.name == "missing":
    raise ImportError("no bindings")


class HTCondorException(Exception):
    pass


class JobAction:
    Remove = "remove"


Submit = dict


@contextlib.contextmanager
def queue(request: str):
    """The state to change; it hangs or crashes before that is done, or after."""
    state = json.loads(STATE.read_text())
    state["asked"].append(request)
    how = state["how"].pop(request, "")
    if not how.startswith("done, "):
        STATE.write_text(json.dumps(state))
        fail(how)
    yield state
    STATE.write_text(json.dumps(state))
    fail(how.removeprefix("done, "))


def fail(how: str) -> None:
    if how == "hang":
        while True:  # As the bindings do: without giving the lock away, if they could.
            time.sleep(60)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


class Schedd:
    def submit(self, description, count):
        with queue("submit") as state:
            if count > state["room"]:
                raise HTCondorException(f"expected next ProcId to be {state['room']}, but Schedd says -3")
            state["room"] -= count
            state["submitted"].append(description)
            number = len(state["submitted"])
            for each in range(count):
                state["jobs"].append({
                    "ClusterId": number, "ProcId": each, "JobStatus": 1, "ServerTime": state["time"],
                    "CtxflowRun": "run",
                    "of": description.get("+CtxflowSubmission", ""),
                })  # fmt: skip
                with open(description["log"], "a") as log:
                    log.write(json.dumps({"EventTypeNumber": 1, "Cluster": number, "Proc": each}) + "\n")
        return SimpleNamespace(cluster=lambda: number, first_proc=lambda: 0)

    def query(self, constraint, projection, limit=-1):
        with queue("query") as state:
            found = [
                {name: ad[name] for name in projection if name in ad} for ad in state["jobs"] if meant(constraint, ad)
            ]
            return found if limit < 0 else found[:limit]

    def edit(self, constraint, attribute, value):
        with queue("edit") as state:
            state["edited"].append([attribute, int(value)])

    def act(self, action, jobs, reason):
        with queue("act") as state:
            state["jobs"] = [
                ad
                for ad in state["jobs"]
                if not (meant(jobs, ad) if isinstance(jobs, str) else f"{ad['ClusterId']}.{ad['ProcId']}" in jobs)
            ]


def meant(constraint, ad) -> bool:
    found = re.search(r'CtxflowSubmission == ("\w+")', constraint)
    return found is None or ad["of"] == found[1]


class JobEventLog:
    def __init__(self, path):
        self._path, self._read = Path(path), 0

    def events(self, wait):
        for line in self._path.read_text().splitlines()[self._read :]:
            self._read += 1
            yield type("Event", (dict,), {"timestamp": 7})(json.loads(line))

    def close(self):
        self._path = None
