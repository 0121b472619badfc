"""A host's cache on the testbed: who comes back to a host, or comes to it in another run, is sent nothing it has."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from suite.depth import for_release

if TYPE_CHECKING:
    from conftest import Testbed

PROGRAM = "/checkout/benchmarks/rejoin_inside.py"
SIZE = 20_000_000
ALTER = "p=$(echo {}/1*/kept/*/content/weights.bin); chmod 600 $p; printf evil | dd of=$p conv=notrunc bs=1 seek=9"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def play(testbed: Testbed, cache: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What was sent to a worker on host1, to the same when it was evicted and came back, and what was said."""
    words = ["--bytes", str(SIZE), "--cache", cache, "--requirements", 'Machine == "host1.testbed"']
    done = testbed.command("run", "python", PROGRAM, *words, check=False, limit=180)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    warm, rejoined = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    return warm, rejoined, done.stderr


@pytest.mark.parametrize("same_disk", [True, *for_release(False)], ids=["one disk", "another disk"])
def test_a_worker_that_comes_back_is_sent_nothing(testbed: Testbed, same_disk: bool) -> None:
    base = "/var/lib/condor/scratch" if same_disk else "/home/alice"
    if same_disk:
        testbed.run("mkdir", "-p", "-m", "1777", base, user="root", host="host1")
    cache = f"{base}/ctxflow-cache"
    try:
        warm, rejoined, _ = play(testbed, cache)
        assert warm["sent_bytes"] >= SIZE and warm["kept"] == 0, warm
        assert (rejoined["sent_bytes"], rejoined["kept"]) == (0, 1), rejoined
        warm, rejoined, said = play(testbed, cache)  # Another run.
        assert (warm["sent_bytes"], rejoined["sent_bytes"]) == (0, 0) and "cache" not in said, said
        testbed.run("bash", "-c", ALTER.format(cache), host="host1")
        warm, rejoined, said = play(testbed, cache)
        assert warm["sent_bytes"] >= SIZE and rejoined["sent_bytes"] == 0, warm
        assert re.search(r"on host1\S*: .* not as it was put there \(files of it were changed", said), said
        left = testbed.run("bash", "-c", f"ls {cache}/1*/work; stat -c %a {cache}/1*", host="host1")
        assert left == "700", left
    finally:
        testbed.run("rm", "-rf", cache, host="host1")


def test_another_users_folder_in_its_place_is_told_and_not_used(testbed: Testbed) -> None:
    cache = "/var/lib/condor/others"
    own = f"{cache}/{testbed.run('id', '-u', host='host1')}"
    testbed.run("mkdir", "-p", own, user="root", host="host1")
    try:
        warm, rejoined, said = play(testbed, cache)
        assert warm["sent_bytes"] >= SIZE and rejoined["sent_bytes"] >= SIZE, rejoined
        assert said.count(f"workers on host1 do without a cache: {own} belongs to another user") == 1, said
        assert not testbed.run("ls", "-A", own, user="root", host="host1")
    finally:
        testbed.run("rm", "-rf", cache, user="root", host="host1")
