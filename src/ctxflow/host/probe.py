"""A job that stands for a worker: it connects back, says what a worker would find where it is, and ends.

`python3 probe.py HOST PORT FILE` with a file that holds what proves that it is one of ours. It is one file, for any
Python 3. What does not live here: starting it and judging what it says (factory/site_check.py).
"""

import hashlib
import hmac
import json
import os
import shutil
import socket
import sys
import tempfile

_SECONDS = 10


def main(host: str, port: str, secret: str) -> int:
    """Say it, and give the exit status."""
    with open(secret, "rb") as file:
        key = file.read()
    place = os.environ.get("_CONDOR_SCRATCH_DIR") or tempfile.gettempdir()
    facts = json.dumps(
        {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:2])),
            "vine_worker": shutil.which("vine_worker"),
            "place": place,
            "free": shutil.disk_usage(place).free,
        }
    ).encode()
    proof = hmac.new(key, facts, hashlib.sha256).hexdigest().encode()
    try:
        with socket.create_connection((host, int(port)), timeout=_SECONDS) as line:
            line.sendall(proof + b" " + facts + b"\n")
            line.recv(1)
    except socket.gaierror:
        sys.stdout.write(f"couldn't resolve hostname {host}\n")
        return 1
    except OSError as error:
        sys.stdout.write(f"couldn't connect to {host}:{port}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
