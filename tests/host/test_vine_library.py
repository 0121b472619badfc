"""The context host as a library of TaskVine: a real process, real pipes; the test plays the vine_worker."""

import base64
import ctypes
import hashlib
import io
import json
import os
import pathlib
import pickle
import signal
import subprocess
import tarfile
import time

import cloudpickle
import pytest
from message_heads import frame
from vine_player import LIBRARY, Player

from ctxflow.files import digest_path
from ctxflow.installing import __version__
from waiting import FOREVER, eventually, exited


@pytest.fixture
def player(tmp_path):
    player = Player(tmp_path)
    assert json.loads(player.message()) == {"name": "ctxflow", "taskid": 3, "exec_mode": "fork"}
    yield player
    player.close()
    assert player.process.returncode == 0


@pytest.fixture
def loaded(player):
    player.answer(player.send(player.load(lambda: 10)))
    return player


def values(reports):
    return [pickle.loads(body) for head, body in reports if head["is"] == "finished"]


def test_it_tells_about_itself(player, tmp_path):
    hello, _ = player.ask("hello")
    assert hello["is"] == "hello"
    assert hello["pid"] == player.process.pid
    assert hello["ctxflow"] == __version__
    assert (hello["cores"], hello["problem"]) == (2, None)
    assert hello["memory"] > 1 << 20
    assert hello["scratch"] == str(tmp_path)
    assert int((tmp_path / "host.pid").read_text()) == player.process.pid
    assert os.getpgid(player.process.pid) == player.process.pid


def test_a_call_that_is_sent_again_is_not_carried_out_again(loaded, tmp_path):
    """Who is between the driver and a worker can repeat what passes, without the key."""
    count = tmp_path / "count"

    def add(made, items):
        with count.open("a") as file:
            file.write("x")
        return items

    name = "=" + base64.b64encode(loaded.seal(b"".join(loaded.call(add, [1])))).decode()
    assert values(loaded.answer(loaded.send(name=name))[1]) == [[1]]
    for _ in range(2):
        status, ((refused, _),) = loaded.answer(loaded.send(name=name))
        assert (status, refused["is"]) == (1, "refused") and "no call counts twice" in refused["message"]
    assert count.read_text() == "x"


def test_a_context_is_built_and_called(player):
    status, ((ready, _),) = player.answer(player.send(player.load(lambda: 10)))
    assert (status, ready["is"], ready["context"], ready["key"]) == (0, "ready", "c", "k")
    function, call = player.call(lambda ten, items: [ten * i for i in items], [1, 2])
    _, reports = player.answer(player.send(function, call))
    assert values(reports) == [[10, 20]]
    assert player.signals
    status, reports = player.answer(player.send(function))
    assert (status, reports) == (0, [])


def test_a_long_call_comes_in_a_file_and_a_path_may_have_spaces(loaded, tmp_path):
    items = [os.urandom(1000) for _ in range(1000)]
    frames = b"".join(loaded.call(lambda ten, items: items, items))
    task = loaded.send(name="@", sandbox=f"{tmp_path}/a b/c", files={"call": loaded.seal(frames)})
    assert values(loaded.answer(task)[1]) == [items]


def test_instructions_are_carried_out_one_after_another_and_the_first_failure_ends_them(player):
    call = player.call(lambda ten, items: [ten * i for i in items], [1])
    more = player.call(lambda ten, items: [ten + i for i in items], [1])
    _, reports = player.answer(player.send(player.load(lambda: 10), *call, *more))
    assert [head["is"] for head, _ in reports] == ["ready", "finished", "finished"]
    assert values(reports) == [[10], [11]]
    _, reports = player.answer(player.send(player.load(lambda: 1 // 0), *call))
    assert [head["is"] for head, _ in reports] == ["failed"]
    bad = player.call(lambda ten, items: 1 // 0, [1])
    _, reports = player.answer(player.send(player.load(lambda: 10), *bad, *more))
    assert [head["is"] for head, _ in reports] == ["ready", "raised"]


def test_two_calls_at_once_are_each_answered_with_their_own(player, tmp_path):
    player.answer(player.send(player.load(lambda: 1, context="a", key="ka")))
    player.answer(player.send(player.load(lambda: 2, context="b", key="kb")))
    gate = tmp_path / "gate"

    def held(value, items):
        while not gate.exists():
            time.sleep(0.01)
        return [value]

    slow = player.send(*player.call(held, [0], context="a"))
    quick = player.send(*player.call(lambda v, items: [v], [0], context="b"))
    assert values(player.answer(quick)[1]) == [[2]]
    assert not player.answered(slow)
    gate.touch()
    assert values(player.answer(slow)[1]) == [[1]]


def test_a_death_answers_every_call_that_it_cost_with_its_own_copy(loaded, tmp_path):
    gate = tmp_path / "gate"

    def crashes(ten, items):
        while not gate.exists():
            time.sleep(0.01)
        ctypes.string_at(0)

    crash = loaded.call(crashes, [1], call=71)
    other = loaded.call(lambda ten, items: items, [1], call=72)
    tasks = [loaded.send(*crash), loaded.send(*other)]
    gate.touch()
    for task, number in zip(tasks, (71, 72), strict=True):
        _, ((died, _),) = loaded.answer(task)
        assert (died["is"], died["calls"], died["failure"]["kind"]) == ("died", [number], "crash")
    late, _ = loaded.ask("call", call=73, context="c", function="none", style="batch", insert=False)
    assert (late["is"], late["calls"]) == ("died", [73])


def test_an_unload_answers_what_is_open_with_nothing(loaded):
    running = loaded.send(*loaded.call(lambda ten, items: time.sleep(FOREVER), [1]))
    unloaded, _ = loaded.ask("unload", context="c")
    assert unloaded == {"is": "unloaded", "context": "c"}
    assert loaded.answer(running) == (0, [])
    assert loaded.answer(loaded.send(frame({"do": "unload", "context": "c"}))) == (0, []), "it is gone already"


def test_a_load_anew_answers_what_is_open_with_nothing(loaded):
    running = loaded.send(*loaded.call(lambda ten, items: time.sleep(FOREVER), [1]))
    slow = loaded.send(loaded.load(time.sleep, FOREVER, key="slow"))
    assert loaded.answer(running) == (0, [])
    _, ((ready, _),) = loaded.answer(loaded.send(loaded.load(lambda: 11, key="last")))
    assert (ready["is"], ready["key"]) == ("ready", "last")
    assert loaded.answer(slow) == (0, [])


def test_an_interrupted_call_is_answered_and_its_context_stays(loaded):
    loaded.answer(loaded.send(*loaded.call(lambda ten, items: items, [1], call=5)))
    assert loaded.answer(loaded.send(frame({"do": "interrupt", "context": "c", "call": 5}))) == (0, [])
    running = loaded.send(*loaded.call(lambda ten, items: time.sleep(FOREVER), [1], call=6))
    waiting = loaded.send(*loaded.call(lambda ten, items: time.sleep(FOREVER), [1], call=7))
    for call in (7, 6):
        assert loaded.answer(loaded.send(frame({"do": "interrupt", "context": "c", "call": call}))) == (0, [])
    for call, number in ((running, 6), (waiting, 7)):
        _, ((raised, _),) = loaded.answer(call)
        assert (raised["is"], raised["call"], raised["failure"]["kind"]) == ("raised", number, "cancelled")
    _, ((finished, _),) = loaded.answer(loaded.send(*loaded.call(lambda ten, items: [ten], [1], call=8)))
    assert finished["is"] == "finished"


def test_what_nobody_asked_for_is_kept_until_somebody_listens(loaded):
    os.kill(loaded.process.pid, signal.SIGTERM)
    eventually(lambda: len(news := loaded.answer(loaded.send(frame({"do": "listen"})))[1]) == 1 and news)
    listening = loaded.send(frame({"do": "listen"}))
    pid = pickle.loads(loaded.answer(loaded.send(*loaded.call(lambda ten, items: [os.getpid()], [1])))[1][0][1])[0]
    assert not loaded.answered(listening)
    os.kill(pid, signal.SIGKILL)
    _, ((died, _),) = loaded.answer(listening)
    assert (died["is"], died["calls"], died["context"]) == ("died", [], "c")


def test_a_second_listener_takes_the_place_of_the_first(player):
    first = player.send(frame({"do": "listen"}))
    second = player.send(frame({"do": "listen"}))
    assert player.answer(first) == (0, [])
    os.kill(player.process.pid, signal.SIGTERM)
    assert player.answer(second) == (0, [({"is": "notice"}, b"")])


@pytest.mark.parametrize("name", ["rubbish", "=rubbish!", "=cnViYmlzaA==", "=", "@"])
def test_what_cannot_be_read_is_refused(player, name):
    status, ((refused, _),) = player.answer(player.send(name=name))
    assert (status, refused["is"]) == (1, "refused")
    assert refused["message"].startswith("the call cannot be read: ")
    assert player.ask("hello")[0]["is"] == "hello"


@pytest.mark.parametrize("head", [{"do": "dance"}, {}, {"do": "call"}, {"do": "fetch"}])
def test_an_instruction_that_makes_no_sense_is_refused(player, head):
    status, ((refused, _),) = player.answer(player.send(frame(head)))
    assert refused["is"] == "refused" if head.get("do") != "fetch" else refused["is"] == "failed"
    assert status == (1 if head.get("do") != "fetch" else 0)
    assert player.ask("hello")[0]["is"] == "hello"


def test_an_answer_that_is_not_taken_is_signalled_again(player):
    before = player.signals
    task = player.send(frame({"do": "hello"}))
    eventually(lambda: player.signals >= before + 3)
    player.answer(task)


def test_a_call_whose_sandbox_is_gone_harms_no_other(player):
    task = player.send(frame({"do": "listen"}))
    os.rmdir(player.sandbox(task))
    os.kill(player.process.pid, signal.SIGTERM)
    assert player.message() == f"{task} 1"
    assert player.ask("hello")[0]["is"] == "hello"


def fetch(digest, source, kind, content):
    """The instruction to keep a file or archive of some content."""
    told = hashlib.blake2b(content, digest_size=16).hexdigest()
    about = {"digest": digest, "content": told, "source": source, "kind": kind, "input": "input"}
    return frame({"do": "fetch", **about})


def test_files_are_seeded_fetched_and_found_by_a_load(player, tmp_path):
    task = player.send(frame({"do": "seed", "input": "input", "output": "out"}), files={"input": b"42"})
    sandbox = player.sandbox(task)
    assert player.answer(task) == (0, [({"is": "done"}, b"")])
    assert os.path.samefile(f"{sandbox}/out", f"{sandbox}/input")

    task = player.send(fetch("d42", "/data/model.bin", "file", b"42"), files={"input": b"42"})
    sandbox = player.sandbox(task)
    _, ((fetched, _),) = player.answer(task)
    place = str(tmp_path / "ctxflow-cache" / "d42" / "model.bin")
    assert fetched == {"is": "fetched", "digest": "d42", "path": place}
    assert os.path.samefile(place, f"{sandbox}/input")

    load = player.load(
        lambda model: pathlib.Path(model).read_text(), cached_files={"model": ["d42", "/data/model.bin"]}
    )
    call = player.call(lambda text, items: [text], [1])
    assert values(player.answer(player.send(load, *call))[1]) == [["42"]]
    assert player.ask("forget", digest="d42")[0] == {"is": "done"}
    _, ((failed, _),) = player.answer(player.send(load, *call))
    assert (failed["is"], failed["key"]) == ("failed", "k")
    assert "/data/model.bin is not in the worker's cache" in failed["failure"]["message"]


def archive(*names):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = 2
            tar.addfile(entry, io.BytesIO(b"42"))
    return packed.getvalue()


def test_a_folder_comes_as_an_archive_and_a_sibling_links_to_it(player, tmp_path):
    packed = archive("a", "deep/b")
    _, ((fetched, _),) = player.answer(player.send(fetch("d1", "/data/model/", "tar", packed), files={"input": packed}))
    assert fetched["path"] == str(tmp_path / "ctxflow-cache" / "d1" / "model")
    assert (tmp_path / "ctxflow-cache" / "d1" / "model" / "deep" / "b").read_text() == "42"
    sibling = Player(tmp_path / "sibling")
    try:
        sibling.message()
        linked, _ = sibling.ask("link", digest="d1", source="/data/model/", path=fetched["path"])
        assert linked["path"] == str(tmp_path / "sibling" / "ctxflow-cache" / "d1" / "model")
        assert os.path.samefile(linked["path"] + "/deep/b", fetched["path"] + "/deep/b")
        failed, _ = sibling.ask("link", digest="d2", source="/data/other", path="/no/such/place")
        assert (failed["is"], failed["digest"], failed["failure"]["error"]) == ("failed", "d2", "FileNotFoundError")
    finally:
        sibling.close()


@pytest.mark.parametrize("content", [b"junk", archive("../../out")], ids=["junk", "reaching out"])
def test_an_archive_that_is_none_leaves_nothing(player, tmp_path, content):
    _, ((failed, _),) = player.answer(player.send(fetch("d1", "/data/model", "tar", content), files={"input": content}))
    assert (failed["is"], failed["digest"]) == ("failed", "d1")
    assert os.listdir(tmp_path / "ctxflow-cache") == []


@pytest.mark.parametrize("kind", ["file", "tar"])
def test_what_was_altered_on_the_way_is_not_used(player, tmp_path, kind):
    """TaskVine sends files in clear from worker to worker: the digest is in the sealed call."""
    sent, came = archive("a"), archive("a", "evil")
    _, ((failed, _),) = player.answer(player.send(fetch("d1", "/data/m", kind, sent), files={"input": came}))
    assert (failed["is"], failed["digest"]) == ("failed", "d1")
    assert "the worker cannot fetch /data/m: what came is not what the driver" in failed["failure"]["message"]
    assert not (tmp_path / "ctxflow-cache").exists()


@pytest.fixture
def with_cache(tmp_path, monkeypatch):
    """Start workers one after another on a host with a cache."""
    monkeypatch.setenv("CTXFLOW_CACHE", str(tmp_path / "kept"))
    monkeypatch.setenv("CTXFLOW_CACHE_GB", "0.1")
    players = []

    def start():
        players.append(Player(tmp_path / f"worker{len(players)}"))
        players[-1].message()
        return players[-1], players[-1].ask("hello")[0]

    yield start
    for each in players:
        each.close()


def kept_fetch(path, content, kind="file"):
    given = archive("a", "deep/b") if kind == "tar" else content
    told = hashlib.blake2b(given, digest_size=16).hexdigest()
    about = {"digest": digest_path(path), "content": told, "source": str(path), "kind": kind, "input": "input"}
    return frame({"do": "fetch", **about, "keep": True}), {"input": given}


def test_a_worker_that_comes_back_to_a_host_begins_with_what_a_build_made_there(with_cache, tmp_path):
    def build():
        from pathlib import Path

        place = Path(os.environ["MADE"], "whole")
        if place.exists():
            return "an earlier one's"
        place.write_text("made")
        return "its own"

    for expected in ("its own", "an earlier one's"):
        worker, _ = with_cache()
        worker.answer(worker.send(worker.load(build, artifacts={"made": "MADE"})))
        _, reports = worker.answer(worker.send(*worker.call(lambda value, items: [value], [1])))
        assert values(reports) == [[expected]]
        eventually(lambda: list((tmp_path / "kept").glob("*/kept/artifacts-*/content/files/made/whole")))
        worker.hang_up()
        exited(worker.process)


def test_a_worker_that_comes_back_to_a_host_has_what_the_one_before_was_sent(with_cache, tmp_path):
    folder, large = tmp_path / "model", tmp_path / "weights.bin"
    (folder / "deep").mkdir(parents=True)
    for name in ("a", "deep/b"):
        (folder / name).write_text("42")
    large.write_bytes(os.urandom(5 << 20))
    first, hello = with_cache()
    assert (hello["kept"], hello["kept_problem"]) == (str(tmp_path / "kept" / str(os.geteuid())), "")
    for path, kind in ((folder, "tar"), (large, "file")):
        take = {"digest": digest_path(path), "source": str(path)}
        assert first.ask("take", **take) == ({"is": "done"}, b"")
        message, files = kept_fetch(path, path.read_bytes() if kind == "file" else b"", kind)
        _, ((fetched, _),) = first.answer(first.send(message, files=files))
        assert fetched["is"] == "fetched" and "unkept" not in fetched
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second, _ = with_cache()
    found = {}
    for path in (folder, large):
        report, _ = second.ask("take", digest=digest_path(path), source=str(path))
        found[path] = pathlib.Path(report["path"])
        assert found[path] == tmp_path / "worker1" / "ctxflow-cache" / digest_path(path) / path.name
        assert digest_path(found[path], again=True) == digest_path(path)
    (found[folder] / "a").write_text("its own")  # What is small is copied.
    assert found[large].stat().st_nlink > 1 and found[large].stat().st_mode & 0o222 == 0
    load = second.load(
        lambda model: pathlib.Path(model, "deep", "b").read_text(),
        cached_files={"model": [digest_path(folder), str(folder)]},
    )
    assert values(second.answer(second.send(load, *second.call(lambda text, items: [text], [1])))[1]) == [["42"]]
    third, _ = with_cache()
    assert third.ask("take", digest=digest_path(folder), source=str(folder))[0]["is"] == "fetched"
    assert (tmp_path / "worker2" / "ctxflow-cache" / digest_path(folder) / "model" / "a").read_text() == "42"


def test_what_was_altered_in_the_hosts_cache_is_told_and_not_used(with_cache, tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * (5 << 20))
    first, hello = with_cache()
    message, files = kept_fetch(path, path.read_bytes())
    first.answer(first.send(message, files=files))
    [content] = pathlib.Path(hello["kept"]).glob("kept/*/content")
    content.chmod(0o600)
    with content.open("r+b") as file:
        file.write(b"evil")
    second, _ = with_cache()
    report, _ = second.ask("take", digest=digest_path(path), source=str(path))
    assert (report["is"], report["failure"]["error"]) == ("failed", "SpoiledEntry")
    assert second.ask("take", digest=digest_path(path), source=str(path))[0] == {"is": "done"}
    _, ((fetched, _),) = second.answer(second.send(message, files=files))
    assert pathlib.Path(fetched["path"]).read_bytes() == path.read_bytes()


def test_a_cache_that_is_full_or_not_its_own_costs_no_file(with_cache, tmp_path, monkeypatch):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * 2000)
    monkeypatch.setenv("CTXFLOW_CACHE_GB", "0.000001")
    first, _ = with_cache()
    message, files = kept_fetch(path, path.read_bytes())
    _, ((fetched, _),) = first.answer(first.send(message, files=files))
    assert pathlib.Path(fetched["path"]).read_bytes() == path.read_bytes()
    assert "weights.bin is not kept in the host's cache: 2e-06 GB are more" in fetched["unkept"]
    (tmp_path / "kept" / str(os.geteuid())).chmod(0o755)
    second, hello = with_cache()
    assert hello["kept"] == "" and "can be entered by others" in hello["kept_problem"]
    _, ((fetched, _),) = second.answer(second.send(message, files=files))
    assert pathlib.Path(fetched["path"]).read_bytes() == path.read_bytes()


def test_staging_from_a_shared_disk(player, tmp_path):
    (tmp_path / "weights").write_text("42")
    staged, _ = player.ask("stage", context="c", files={"w": [str(tmp_path / "weights"), "dw"]})
    assert staged["is"] == "staged"
    assert (tmp_path / "ctxflow-cache" / "dw" / "weights").read_text() == "42"
    failed, _ = player.ask("stage", context="c", files={"w": [str(tmp_path / "none"), "dn"]})
    assert failed["is"] == "failed"


def test_it_gives_back_the_devices_of_the_batch_system(tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.touch(0o755)
    for number, (given, found) in enumerate([({"CTXFLOW_CUDA_VISIBLE_DEVICES": "GPU-7,GPU-8"}, 2), ({}, 0)]):
        # The wrapper's number is that of a process that can take the signal of a release: our own child.
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {"CTXFLOW_WORKER_PID": "1", "CUDA_VISIBLE_DEVICES": "0", "PATH": path}
        card = "0, GPU-7, NVIDIA A10, 24576, 00000000:11:00.0"
        tool.write_text(f"#!/bin/sh\necho {card if found else 'No devices were found; exit 6'}\n")
        player = Player(tmp_path / str(number), environment={**environment, **given})
        try:
            player.message()
            hello, _ = player.ask("hello")
            assert hello["gpus"] == found
            assert hello["gpu_model"] == ("NVIDIA A10" if found else None)
            call = player.call(lambda _, items: [os.environ.get("CUDA_VISIBLE_DEVICES")], [1])
            _, reports = player.answer(player.send(player.load(), *call))
            assert values(reports) == [[given.get("CTXFLOW_CUDA_VISIBLE_DEVICES")]]
        finally:
            player.close()


def test_it_closes_what_it_inherited(tmp_path):
    leaked = os.open("/dev/null", os.O_RDONLY)
    player = Player(tmp_path, inherited=[leaked])
    try:
        player.message()
        found = os.listdir(f"/proc/{player.process.pid}/fd")
        assert "/dev/null" not in [os.readlink(f"/proc/{player.process.pid}/fd/{fd}") for fd in found if int(fd) > 2]
    finally:
        player.close()
        os.close(leaked)


def test_it_ends_with_all_its_processes_when_the_worker_hangs_up(tmp_path):
    player = Player(tmp_path)
    player.message()

    def start(_, items):
        child = os.fork()
        if not child:
            os.setsid()
            time.sleep(FOREVER)
        return [[os.getpid(), child]]

    _, reports = player.answer(player.send(player.load(), *player.call(start, [1])))
    ((pids,),) = values(reports)
    player.close()
    assert player.process.returncode == 0
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_a_host_in_the_place_of_a_killed_one_ends_the_worker(tmp_path):
    """TaskVine starts it; of the first one's contexts and items in flight it knows nothing."""
    first = Player(tmp_path)
    first.message()
    first.process.kill()
    first.process.wait()
    with subprocess.Popen(["sleep", "600"]) as wrapper:
        # A shell stands for the vine_worker, which a host ends where its wrapper does not.
        command = ["sh", "-c", '"$@" --worker-pid $$; :', "sh", *LIBRARY]
        second = Player(tmp_path, command, {"CTXFLOW_WORKER_PID": str(wrapper.pid)})
        try:
            assert exited(wrapper) == -signal.SIGUSR1
        finally:
            wrapper.kill()
            second.process.kill()
    first.close()
    second.close()


def test_a_function_travels_once_and_serves_many_calls(loaded):
    loaded.answer(loaded.send(frame({"do": "function", "function": "g"}, cloudpickle.dumps(lambda ten, items: items))))
    for number in range(100, 103):
        head = {"do": "call", "call": number, "context": "c", "function": "g", "style": "batch", "insert": False}
        assert values(loaded.answer(loaded.send(frame(head, pickle.dumps(([number],)))))[1]) == [[number]]


# --- results one by one


def parts(reports):
    return {head["first"]: pickle.loads(body) for head, body in reports if "first" in head}


def yielding(player, tmp_path, count=4):
    """A call of an app that answers its items one by one, each when a file is there for it."""

    def app(ten, items):
        for item in items:
            while not os.path.exists(f"{tmp_path}/item-{item}"):
                time.sleep(0.01)
            yield ten * item

    return player.send(*player.call(app, list(range(count)), every=0.0))


def test_results_are_told_to_who_listens_and_come_again_with_the_answer_until_they_are_confirmed(loaded, tmp_path):
    listening, task = loaded.send(frame({"do": "listen"})), yielding(loaded, tmp_path)
    (tmp_path / "item-0").touch()
    _, reports = loaded.answer(listening)
    assert [head["is"] for head, _ in reports] == ["part"] and parts(reports) == {0: [0]}
    listening = loaded.send(frame({"do": "listen"}))  # Which confirms that one.
    (tmp_path / "item-1").touch()
    assert parts(loaded.answer(listening)[1]) == {1: [10]}
    (tmp_path / "item-2").touch()  # Nobody listens.
    (tmp_path / "item-3").touch()
    _, reports = loaded.answer(task)
    assert [head["is"] for head, _ in reports] == ["part", "part", "finished"]
    assert parts(reports) == {1: [10], 2: [20], 3: [30]}
    listening = loaded.send(frame({"do": "listen"}))
    loaded.process.send_signal(signal.SIGTERM)
    assert [head["is"] for head, _ in loaded.answer(listening)[1]] == ["notice"], "nothing is told once more"


def test_a_notice_ends_a_call_with_the_item_in_flight(loaded, tmp_path):
    task = yielding(loaded, tmp_path)
    (tmp_path / "item-0").touch()
    listening = loaded.send(frame({"do": "listen"}))
    assert parts(loaded.answer(listening)[1]) == {0: [0]}
    listening = loaded.send(frame({"do": "listen"}))
    loaded.process.send_signal(signal.SIGTERM)
    assert [head["is"] for head, _ in loaded.answer(listening)[1]] == ["notice"]
    (tmp_path / "item-1").touch()
    _, reports = loaded.answer(task)
    assert [head["is"] for head, _ in reports] == ["part", "finished"]
    assert parts(reports)[1] == [10]
    head, _ = reports[-1]
    assert (head["first"], head["count"]) == (2, 0)
    _, reports = loaded.answer(yielding(loaded, tmp_path))
    assert (reports[0][0]["is"], reports[0][0]["count"]) == ("finished", 0), "another call does not begin"


def test_what_came_before_an_error_is_in_its_answer(loaded, tmp_path):
    def app(ten, items):
        yield 1
        raise ValueError("two")

    _, reports = loaded.answer(loaded.send(*loaded.call(app, [1, 2, 3], every=0.0)))
    assert [head["is"] for head, _ in reports] == ["part", "raised"]
    assert reports[1][0]["at"] == 1


def test_what_is_parked_and_woken_is_told_to_who_listens(loaded):
    def listened():
        _, ((report, _),) = loaded.answer(loaded.send(frame({"do": "listen"})))
        return report

    loaded.answer(loaded.send(*loaded.call(lambda made, items: [made])))
    assert loaded.answer(loaded.send(frame({"do": "park", "context": "c"})))[0] == 0
    asleep = listened()
    assert (asleep["is"], asleep["context"], asleep["key"]) == ("asleep", "c", "k")
    assert asleep["memory"] > 1 << 20
    loaded.answer(loaded.send(frame({"do": "wake", "context": "c"})))
    assert listened()["is"] == "awake"
    assert values(loaded.answer(loaded.send(*loaded.call(lambda made, items: [made + items[0]], [1])))[1]) == [[11]]


def test_what_is_loaded_along_with_a_park_waits_for_it(loaded):
    class Slow:
        def __init__(self, log):
            self.log = log

        def park(self):
            time.sleep(0.5)
            self.log.append("parked")

        def wake(self):
            raise AssertionError

    loaded.answer(loaded.send(loaded.load(Slow, [], context="slow", key="s")))
    park, load = frame({"do": "park", "context": "slow"}), loaded.load(time.monotonic, context="next", key="n")
    began = time.monotonic()
    _, ((ready, _),) = loaded.answer(loaded.send(park, load))
    assert ready["is"] == "ready"
    assert (
        values(loaded.answer(loaded.send(*loaded.call(lambda at, items: [at], [1], context="next")))[1])[0][0]
        > began + 0.5
    )
