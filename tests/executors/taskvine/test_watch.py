"""Who is asked, who is given up and when, with calls that nobody answers by itself."""

from ctxflow.executors.protocol import Patience
from ctxflow.executors.taskvine import vine_workers
from ctxflow.executors.taskvine.vine_workers import VineWorker, Watch
from ctxflow.host.messages import Ping


class Calls:
    """Takes calls; `open` are those that are not answered."""

    def __init__(self):
        self.asked = []
        self.open = set()

    def make(self, worker, messages, then):
        assert [type(each) for each in messages] == [Ping]
        self.asked.append(worker.name)

    def is_open(self, number):
        return number in self.open


class Clock:
    """Time that goes on by itself alone where a test says so."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


class Played:
    def __init__(self, monkeypatch, **patience):
        self.clock, self.calls = Clock(), Calls()
        monkeypatch.setattr(vine_workers, "time", self.clock)
        self.watch = Watch(Patience(**patience), self.calls, lambda worker, reports: None)

    def lost_after(self, seconds, hearing=True):
        """Who is lost in the next so many seconds, and after how many."""
        found = []
        for second in range(1, seconds + 1):
            self.clock.now += 1.0
            found += [(worker.name, second, reason) for worker, reason in self.watch.look(self.clock.now, hearing)]
        return found


def worker(name="w"):
    return VineWorker(name, "host1", "", 0.0, joined=True)


def test_a_worker_that_answers_is_asked_now_and_then_and_kept(monkeypatch):
    played = Played(monkeypatch)
    played.watch.greeted(worker())
    for _ in range(20):
        assert not played.lost_after(5)
        played.watch.heard("w")
    assert not played.calls.asked, "one that is heard of anyway is not asked"
    for _ in range(10):
        assert not played.lost_after(10)
        played.watch.heard("w")
    assert len(played.calls.asked) == 10


def test_one_that_does_not_is_lost(monkeypatch):
    played = Played(monkeypatch)
    played.watch.greeted(worker())
    name, seconds, reason = played.lost_after(30)[0]
    assert (name, played.calls.asked) == ("w", ["w"])
    assert 20 <= seconds <= 23
    assert reason.startswith("its context host has not answered for 2")


def test_nobody_is_lost_while_the_manager_is_busy(monkeypatch):
    played = Played(monkeypatch)
    played.watch.greeted(worker())
    assert not played.lost_after(10)
    assert not played.lost_after(600, hearing=False)
    assert played.lost_after(20)


def test_a_call_that_is_overdue_has_its_host_asked_at_once(monkeypatch):
    played = Played(monkeypatch)
    slow = worker()
    played.watch.greeted(slow)
    played.calls.open = {1, 2, 3}
    slow.due.update({1: 1.0, 2: 100.0, 3: 1.0})
    played.calls.open.discard(3)
    assert played.lost_after(5) == []
    assert played.calls.asked == ["w"], "before it would be asked anyway"
    assert set(slow.due) == {2}
    name, seconds, _ = played.lost_after(30)[0]
    assert (name, seconds <= 4) == ("w", True)


def test_a_host_that_answers_then_sees_to_the_timeout(monkeypatch):
    played = Played(monkeypatch)
    slow = worker()
    played.watch.greeted(slow)
    played.calls.open = {1}
    slow.due[1] = 1.0
    played.lost_after(5)
    played.watch.heard("w")
    assert not played.lost_after(5)
    assert len(played.calls.asked) == 1


def test_who_does_not_go_is_lost_and_is_not_asked(monkeypatch):
    played = Played(monkeypatch)
    going = worker()
    played.watch.greeted(going)
    played.watch.dismissed(going)
    [(name, seconds, reason), *_] = played.lost_after(16)
    assert (name, seconds, played.calls.asked) == ("w", 15, [])
    assert reason == "it was told to go 15 s ago, and is still there"
    played.watch.lost(going)
    assert not played.lost_after(60)
