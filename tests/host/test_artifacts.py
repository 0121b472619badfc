"""What builds make is kept for the next on the same host, and never used where it is not what it should be."""

import glob
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from test_host import Driven

from ctxflow.host import keeping_artifacts
from ctxflow.host.artifact_keys import OWN
from ctxflow.host.artifacts import MOST_BYTES, ArtifactStore, NotKept
from ctxflow.host.host_cache import SpoiledEntry
from ctxflow.host.messages import ArtifactsFailed, ArtifactsMade
from waiting import FOREVER, eventually, exited

KEY = "artifacts-0"


@pytest.fixture
def store(tmp_path):
    store = ArtifactStore(str(tmp_path / "store"))
    yield store
    store.close()


@pytest.fixture
def driven(tmp_path, store):
    (tmp_path / "logs").mkdir()
    driven = Driven(tmp_path, store)
    yield driven
    driven.close()


def folder(place, **files):
    for name, text in files.items():
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return str(place)


def texts(place):
    return {str(path.relative_to(place)): path.read_text() for path in Path(place).rglob("*") if path.is_file()}


def kept_files(tmp_path):
    # As a shell does: what goes meanwhile is no error, as it is one to Path.glob.
    found = glob.glob(f"{tmp_path}/store/*/kept/*/content/files/**/*", recursive=True)
    return [Path(path) for path in found if os.path.isfile(path)]


def compiled():
    """Build something that takes what an earlier build made, or makes it; return which."""
    place = Path(os.environ["MADE"]) / "whole"
    if place.exists():
        return place.read_text()
    place.write_text("an earlier one's")
    return "its own"


def load(driven, function=compiled, context="c", **more):
    driven.load(function, context=context, **{"artifacts": {"made": "MADE"}, **more})
    return driven.next("ready")[0]


def answer(driven, context="c"):
    driven.call(lambda value, items: [value], [None], context=context)
    return pickle.loads(driven.next("finished")[1])[0]


def until_kept(driven, tmp_path, count=1):
    eventually(
        lambda: (len(kept_files(tmp_path)) == count and not driven.host._artifacts._running) or driven.step(0.01),
        pause=0.001,
    )


# --- the store


def test_what_is_kept_is_taken_as_it_was(store, tmp_path):
    made = folder(tmp_path / "made", a="1", b="2")
    folder(tmp_path / "made" / "in", c="3")
    os.chmod(tmp_path / "made" / "b", 0o755)
    (tmp_path / "made" / "link").symlink_to("/etc/passwd")
    assert store.keep(KEY, {"x": made, "y": str(tmp_path / "nothing")}, "x")
    assert store.take(KEY, {"x": str(tmp_path / "new"), "y": str(tmp_path / "nothing")})
    assert texts(tmp_path / "new") == {"a": "1", "b": "2", "in/c": "3"}
    assert (tmp_path / "new" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "new" / "a").write_text("may be written to")
    assert not store.keep(KEY, {"x": made}, "x")  # It is there.
    assert store.keep(KEY, {"x": str(tmp_path / "new")}, "x")
    assert store.take(KEY, {"x": str(tmp_path / "third")})
    assert texts(tmp_path / "third")["a"] == "may be written to"


def test_nothing_is_kept_of_nothing(store, tmp_path):
    assert not store.keep(KEY, {"x": str(tmp_path / "x")}, "x")
    assert not store.has(KEY) and not store.take(KEY, {"x": str(tmp_path / "x")})
    assert not (tmp_path / "store").exists()


def test_the_store_is_of_its_user_alone(store, tmp_path):
    store.keep(KEY, {"x": folder(tmp_path / "x", a="1")}, "x")
    assert (tmp_path / "store" / str(os.geteuid())).stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "store" / str(os.geteuid()), 0o755)
    with pytest.raises(NotKept, match="can be entered by others"):
        ArtifactStore(str(tmp_path / "store")).take(KEY, {"x": str(tmp_path / "y")})
    assert texts(tmp_path / "y") == {}


def flip(path):
    """Turn a bit, and leave size and times as they are."""
    before = path.stat()
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    path.chmod(before.st_mode & 0o777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_byte_is_found(store, tmp_path):
    store.keep(KEY, {"x": folder(tmp_path / "x", a="1")}, "x")
    flip(kept_files(tmp_path)[0])
    with pytest.raises(NotKept, match="spoiled"):
        store.take(KEY, {"x": str(tmp_path / "y")})
    assert texts(tmp_path / "y") == {} and not store.has(KEY)


def test_what_is_too_large_is_not_kept(store, tmp_path):
    made = folder(tmp_path / "x", a="1234")
    os.truncate(tmp_path / "x" / "a", MOST_BYTES + 1)  # It takes no room.
    with pytest.raises(NotKept, match="more than"):
        store.keep(KEY, {"x": made}, "x")
    assert not store.has(KEY)


def test_nothing_half_is_left_by_one_that_is_killed(store, tmp_path):
    """At any moment of keeping, also over what was there."""
    made = folder(tmp_path / "made", **{f"f{n}": "x" * 200_000 for n in range(100)})
    program = f"""
from ctxflow.host.artifacts import ArtifactStore
print(flush=True)
ArtifactStore({str(tmp_path / "store")!r}).keep({KEY!r}, {{"x": {made!r}}}, "x")
print("kept", flush=True)
"""
    seen = set()
    for number in range(12):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(number * 0.01)
        process.send_signal(signal.SIGKILL)
        exited(process)
        process.stdout.close()
        other, place = ArtifactStore(str(tmp_path / "store")), tmp_path / f"taken-{number}"
        taken = other.take(KEY, {"x": str(place)})
        assert texts(place) == (texts(made) if taken else {})
        seen.add(taken)
        other.forget(KEY)
        other.close()
    assert store.keep(KEY, {"x": made}, "x") and store.take(KEY, {"x": str(tmp_path / "after")})
    assert False in seen


# --- a host


def test_the_second_build_begins_with_what_the_first_made(driven, tmp_path):
    assert load(driven)["artifacts"] == ""
    assert answer(driven) == "its own"
    until_kept(driven, tmp_path)
    found = load(driven)
    assert found["artifacts"] == "used" and "artifacts" in found["parts"]
    assert answer(driven) == "an earlier one's"
    assert load(driven, context="another")["artifacts"] == ""
    assert answer(driven, "another") == "its own"


def test_another_host_has_it_too(driven, store, tmp_path):
    load(driven)
    until_kept(driven, tmp_path)
    driven.tell("unload", context="c")
    driven.next("unloaded")
    (tmp_path / "second" / "logs").mkdir(parents=True)
    second = Driven(tmp_path / "second", ArtifactStore(store.folder))
    try:
        load(second)
        assert answer(second) == "an earlier one's"
    finally:
        second.close()


def test_what_a_first_call_makes_is_kept_also_at_a_hosts_end(driven, tmp_path, monkeypatch):
    monkeypatch.setattr(keeping_artifacts, "_FINISH_SECONDS", FOREVER)
    driven.load(lambda: None, artifacts={"made": "MADE"})
    driven.next("ready")

    def compile_late(value, items):
        Path(os.environ["MADE"], "late").write_text("by a call")
        return items

    driven.call(compile_late, [1])
    driven.next("finished")
    driven.host.stop()
    assert [path.read_text() for path in kept_files(tmp_path)] == ["by a call"]


def test_a_folder_that_the_recipe_names(driven, tmp_path):
    def build():
        place = Path("engine/plan")
        if place.exists():
            return "there"
        place.parent.mkdir()
        place.write_text("made")
        return "made"

    where = tmp_path / "where"
    for expected in ("made", "there"):
        where.mkdir()
        load(driven, build, artifacts={"plan": "engine"}, directory=str(where))
        assert answer(driven) == expected
        until_kept(driven, tmp_path)
        driven.tell("unload", context="c")
        driven.next("unloaded")
        where.rename(tmp_path / expected)


def test_compile_caches_need_no_word_unless_somebody_has_set_them(driven, monkeypatch):
    # As torch itself does in a program that has compiled something.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_somebody"))

    def caches():
        return {name: os.environ.get(name) for name in OWN}

    load(driven, caches, artifacts={}, environment={"TRITON_CACHE_DIR": "/mine"})
    found = answer(driven)
    assert found.pop("TRITON_CACHE_DIR") == "/mine"
    assert all("artifacts" in place for place in found.values())
    load(driven, caches, artifacts=None, context="none")
    assert set(answer(driven, "none").values()) == {None}


def test_a_forked_process_has_its_own(driven):
    places = []
    for context in ("a", "b"):
        assert load(driven, lambda: os.environ["MADE"], context=context)["started"] == "forked"
        places.append(answer(driven, context))
    assert len(set(places)) == 2


def test_a_flipped_byte_has_it_built_again_and_is_told(driven, tmp_path):
    load(driven)
    until_kept(driven, tmp_path)
    flip(kept_files(tmp_path)[0])
    assert load(driven)["artifacts"].startswith("spoiled: ")
    assert answer(driven) == "its own"
    until_kept(driven, tmp_path)
    assert load(driven)["artifacts"] == "used"


@pytest.mark.parametrize("end", ["raises", "dies"])
def test_a_build_that_fails_with_artifacts_is_tried_once_without(driven, tmp_path, end):
    def build(how):
        if (Path(os.environ["MADE"]) / "whole").exists():
            if how == "dies":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError("bad cache")
        return compiled()

    def begin():
        driven.load(build, end, artifacts={"made": "MADE"})
        return driven.next("ready")[0]

    begin()
    until_kept(driven, tmp_path)
    found = begin()
    assert found["artifacts"].startswith("failed: ")
    assert answer(driven) == "its own"


def test_a_build_that_fails_without_them_is_not_tried_again(driven, tmp_path):
    def build():
        with open(tmp_path / "tries", "a") as file:
            file.write(".")
        raise ValueError("always")

    driven.load(build, artifacts={"made": "MADE"})
    assert driven.next("failed")[0]["context"] == "c"
    assert (tmp_path / "tries").read_text() == "."


def test_a_first_call_that_dies_with_artifacts_has_the_next_build_without(driven, tmp_path):
    load(driven)
    until_kept(driven, tmp_path)
    assert load(driven)["artifacts"] == "used"
    driven.call(lambda value, items: os._exit(3), [1])
    driven.next("died")
    until_kept(driven, tmp_path, 0)
    assert load(driven)["artifacts"] == ""
    assert answer(driven) == "its own"


# --- those of other hosts


@pytest.fixture
def elsewhere(driven, store, tmp_path):
    """What a build made on another host, as it comes from there: key, digest, and path of the file."""
    load(driven)
    until_kept(driven, tmp_path)
    driven.tell("unload", context="c")
    driven.next("unloaded")
    [key] = os.listdir(glob.glob(f"{store.folder}/*/kept")[0])
    digest, size = store.pack(key, str(tmp_path / "sent"))
    assert size == os.path.getsize(tmp_path / "sent")
    return key, digest, str(tmp_path / "sent")


@pytest.fixture
def here(tmp_path):
    """A host that has nothing yet, and what it tells the driver."""
    (tmp_path / "here" / "logs").mkdir(parents=True)
    driven, told = Driven(tmp_path / "here", ArtifactStore(str(tmp_path / "here" / "store"))), []
    driven.host.keep_artifacts(driven.host._artifacts.store, told.append)
    yield driven, told
    driven.close()


def told_of(driven, told, kind):
    found = eventually(lambda: [each for each in told if isinstance(each, kind)] or driven.step(0.01), pause=0.001)
    return found[0]


def test_a_build_begins_with_what_came_from_another_host(elsewhere, here):
    (driven, told), (key, digest, path) = here, elsewhere
    assert load(driven, sent={key: (digest, path)})["artifacts"] == "used"
    assert answer(driven) == "an earlier one's"
    made = told_of(driven, told, ArtifactsMade)
    assert (made.context, made.key, made.size) == ("c", key, len("an earlier one's"))
    os.unlink(path)
    assert load(driven, sent={key: (digest, path)})["artifacts"] == "used", "this host keeps it itself now"


def test_what_came_for_another_key_is_left(elsewhere, here):
    (driven, _), (key, digest, path) = here, elsewhere
    assert load(driven, sent={f"{key[:-1]}{'0' if key[-1] != '0' else '1'}": (digest, path)})["artifacts"] == ""
    assert answer(driven) == "its own"


def test_what_was_altered_on_the_way_is_told_and_not_used_again(elsewhere, here):
    (driven, _), (key, digest, path) = here, elsewhere
    flip(Path(path))
    assert load(driven, sent={key: (digest, path)})["artifacts"].startswith("spoiled: what another host's build made")
    assert answer(driven) == "its own"


@pytest.mark.parametrize("end", ["a build", "a first call"])
def test_what_does_harm_is_told_and_not_used_again(elsewhere, here, end):
    (driven, told), (key, digest, path) = here, elsewhere
    sent = {key: (digest, path)}

    def context():
        return compiled() if end != "a build" or not os.listdir(os.environ["MADE"]) else os._exit(3)

    found = load(driven, context, sent=sent)
    if end == "a build":
        assert found["artifacts"].startswith("failed: ")
    else:
        driven.call(lambda value, items: os._exit(3), [1])
        driven.next("died")
    failed = told_of(driven, told, ArtifactsFailed)
    assert (failed.context, failed.key, failed.digest) == ("c", key, digest)
    driven.host.keep_artifacts(ArtifactStore(driven.host._artifacts.store.folder + "-empty"), told.append)
    assert load(driven, context, sent=sent)["artifacts"] == ""


def test_nothing_is_packed_that_is_not_as_it_was_kept(elsewhere, store, tmp_path):
    key = elsewhere[0]
    [file] = kept_files(tmp_path)
    flip(file)
    with pytest.raises((NotKept, SpoiledEntry)):
        store.pack(key, str(tmp_path / "again"))
    with pytest.raises(FileNotFoundError):
        store.pack("artifacts-unknown", str(tmp_path / "again"))


def test_later_calls_that_die_leave_artifacts_alone(driven, tmp_path):
    load(driven)
    until_kept(driven, tmp_path)
    load(driven)
    answer(driven)
    driven.call(lambda value, items: os._exit(3), [1])
    driven.next("died")
    assert load(driven)["artifacts"] == "used"


def test_what_is_not_kept_is_told_once(driven, tmp_path):
    def large():
        path = os.path.join(os.environ["MADE"], "whole")
        with open(path, "w"):
            os.truncate(path, MOST_BYTES + 1)  # It takes no room.

    load(driven, large)
    until_kept(driven, tmp_path, 0)
    assert load(driven, large)["artifacts"].startswith("not kept: ")
    until_kept(driven, tmp_path, 0)
    assert load(driven, large)["artifacts"] == ""


def test_digests_that_cannot_be_read_are_no_digests(store, tmp_path):
    store.keep(KEY, {"x": folder(tmp_path / "x", a="1")}, "x")
    [digests] = (tmp_path / "store").glob("*/kept/*/content/digests")
    text = json.dumps({"x": "0" * 32}).encode()
    before = digests.stat()
    digests.chmod(0o600)
    digests.write_bytes(text)
    os.utime(digests, ns=(before.st_atime_ns, before.st_mtime_ns))
    digests.chmod(before.st_mode & 0o777)
    with pytest.raises(NotKept):
        store.take(KEY, {"x": str(tmp_path / "y")})
