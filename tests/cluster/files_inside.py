"""Runs inside the testbed: files of calls on a real TaskVine worker, which does not stand where the driver does.

With `local` as argument the worker is a process of this machine, else a job of the pool. Prints what came of it as
JSON.
"""

import functools
import http.server
import json
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

import cloudpickle
import parsl
from parsl import File, bash_app, python_app

from ctxflow import ContextExecutor, batch_app, context, context_app
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import finished

TESTBED = Path(__file__).resolve().parents[2] / "site-configs" / "testbed.toml"
LOCAL = Site(
    engine="taskvine",
    tiers=(Tier(name="here", provider="local", workers=1, cores=1, memory_gb=2, disk_gb=2, gpus=0),),
    taskvine={"address": "127.0.0.1"},
)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@context
def ten():
    return 10


@python_app
def copy(inputs=(), outputs=()):
    Path("left-behind").touch()
    Path(outputs[0]).write_text(Path(inputs[0]).read_text() + " and back")
    return os.getcwd()


@python_app
def grow(size, outputs=()):
    Path(outputs[0]).write_bytes(b"x" * size)


@bash_app
def say(what, inputs=(), stdout=None):
    return f"cat {inputs[0]}; {what}"


@context_app(ten())
def crash(ten, outputs=()):
    Path(outputs[0]).write_text("half")
    os._exit(1)


@batch_app(ten())
def add(ten, files):
    return [ten + int(Path(file).read_text()) for file in files]


def outcome(future):
    try:
        return finished(future).result()
    except Exception as error:
        return type(error).__name__


def told():
    """The warnings of ctxflow from now on."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ctxflow").addHandler(handler)
    return messages


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing of it."""

    def log_message(self, *words):
        pass


def web(folder):
    """A web server of a folder's files; its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main(local):
    """Run each kind of call that has files."""
    home = Path(tempfile.mkdtemp(dir=os.path.expanduser("~")))
    os.chdir(home)
    Path("in.txt").write_text("there")
    for number in range(3):
        Path(f"{number}.txt").write_text(str(number))
    messages, found = told(), {}
    with parsl.load(ContextExecutor.config(LOCAL if local else str(TESTBED), workers=1)) as kernel:
        first = copy(inputs=[File("in.txt")], outputs=[File("deep/out.txt")])
        second = copy(inputs=[first.outputs[0]], outputs=[File(str(home / "last.txt"))])
        found["elsewhere"] = finished(second).result() != str(home)
        found["last"] = Path("last.txt").read_text()
        found["printed"] = [
            outcome(say(what, inputs=[File("in.txt")], stdout="said.txt")) for what in ("true", "false")
        ]
        found["said"] = Path("said.txt").read_text()
        found["crashed"] = outcome(crash(outputs=[File("crashed.txt")]))
        found["there"] = Path("crashed.txt").exists()
        found["missing"] = outcome(copy(inputs=[File("none.txt")], outputs=[File("x")]))
        found["items"] = [outcome(add(File(f"{number}.txt"))) for number in range(3)]
        finished(grow(50_000_000, outputs=[File("big")])).result()
        found["big"] = Path("big").stat().st_size
        found["many"] = sum(
            outcome(future) is not None
            for future in [copy(inputs=[File("in.txt")], outputs=[File(f"many/{n}.txt")]) for n in range(200)]
        )
        found["came"] = len(os.listdir("many"))
        if local:
            found["web"] = outcome(copy(inputs=[File(f"{web(home)}/in.txt")], outputs=[File("web.txt")])) is not None
            found["fetched"] = Path("web.txt").read_text()
        found["workers"] = kernel.executors["ctxflow"].status().workers_joined
    found["beside"] = [str(path) for path in Path(home).rglob("output-*")]
    found["told"] = [message.split(":")[0] for message in messages]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] == ["local"])
