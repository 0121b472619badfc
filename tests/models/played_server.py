"""A program that serves OpenAI's API badly: it does what a request's "do" says."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

options = argparse.ArgumentParser()
options.add_argument("--socket")
options.add_argument("--port", type=int)
options.add_argument("--key-file")
options.add_argument("--elsewhere", type=int, help="listen there in place of --port")
options.add_argument("--children", type=int, default=0)
options.add_argument("--deaf", action="store_true")
options.add_argument("--until", type=Path, help="not ready until there is such a file")
options.add_argument("--end", type=int)
options.add_argument("--say", default="")
given = options.parse_args(None if __name__ == "__main__" else [])
tries = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = False

    def address_string(self):
        return "somebody"

    def log_message(self, *words):
        pass

    def give(self, status, data):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def may(self):
        key = Path(given.key_file).read_text().strip() if given.key_file else os.environ.get("PLAYED_KEY", "")
        if self.headers.get("Authorization") == (f"Bearer {key}" if key else None):
            return True
        self.give(401, {"error": {"message": "wrong key"}})
        return False

    def do_GET(self):
        if self.path == "/health":
            self.give(503 if given.until and not given.until.exists() else 200, b"")
        elif self.path != "/v1/models":
            self.give(404, b"")
        elif self.may():
            self.give(200, {"data": [{"id": "base"}, {"id": "adapter"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.may():
            return
        do = body.get("do", "echo")
        tries[do] = tries.get(do, 0) + 1
        if do == "die":
            print("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "leave":
            print("about to leave")
            os._exit(3)
        elif do == "hang":
            threading.Event().wait()
        elif do == "compute":
            until = time.monotonic() + body["seconds"]
            while time.monotonic() < until:  # With much less than a core, which is a lot more than nothing.
                enough = time.thread_time() + 0.015
                while time.thread_time() < enough:
                    sum(range(1000))
                time.sleep(0.08)
            self.give(200, {"choices": [], "echo": body})
        elif do == "drop" or (do == "drop-once" and tries[do] == 1):
            self.connection.shutdown(socket.SHUT_RDWR)
        elif do == "busy" and tries[do] < 4:
            self.give(429 if tries[do] % 2 else 503, {"error": "busy"})
        elif do == "count":
            self.give(200, {"choices": [], "tries": tries.get(body["of"], 0)})
        elif isinstance(do, int):
            self.give(do, body.get("said", {"error": {"message": "so it is"}}))
        elif do == "rubbish":
            self.give(200, b"<html>")
        else:
            said = {"text": "{}", "message": {"role": "assistant", "content": "{}"}, "finish_reason": "stop"}
            texts = body["prompt"] if isinstance(body.get("prompt"), list) else [0]
            each = int(body["n"]) if body.get("n") in range(200) else 1
            count = each * len(texts) if {"prompt", "messages"} & body.keys() else 0
            choices = [{"index": number, **said} for number in range(count)]
            self.give(200, {"choices": choices, "echo": body, "nan": body.get("nan")})


class AtSocket(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0

    def get_request(self):
        return self.socket.accept()[0], ("", 0)


if __name__ == "__main__":
    print(given.say, flush=True)
    if given.end is not None:
        sys.exit(given.end)
    if given.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(given.children):  # In sessions of their own, as helpers that outlive their parents.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if given.socket:
        AtSocket(given.socket, Handler).serve_forever()
    else:
        ThreadingHTTPServer(("127.0.0.1", given.elsewhere or given.port), Handler).serve_forever()
