"""Who is connected: what is believed of those whom TaskVine lets in."""

from ctxflow.executors.taskvine.manager_messages import Roster, StrangerConnected, WorkerConnected, WorkerGone


def row(address, name=None):
    return {"addrport": address, "hostname": "h", **({} if name is None else {"factory_name": name})}


def test_a_name_is_the_first_one_s_who_has_it():
    """Two connections with one name, both of which end, ended the manager's process."""
    roster = Roster()
    assert roster.look([row("a:1", "n1")], 0.0) == [WorkerConnected("n1", "a:1", "h")]
    told = roster.look([row("a:1", "n1"), row("b:2", "n1")], 1.0)
    assert told == [StrangerConnected("h", "it has the name of another worker")]
    assert roster.look([row("a:1", "n1"), row("b:2", "n1")], 2.0) == [], "told once"
    assert roster.look([row("a:1", "n1")], 3.0) == [], "nothing is lost when the stranger goes"
    assert roster.look([], 4.0) == [WorkerGone("n1")]
    assert roster.look([row("b:2", "n1")], 5.0) == [WorkerConnected("n1", "b:2", "h")]


def test_a_worker_tells_its_name_a_moment_after_it_has_connected():
    roster = Roster()
    assert roster.due((1, 0), 0.0) and roster.look([row("a:1")], 0.0) == []
    assert not roster.due((1, 0), 0.01) and roster.due((1, 0), 0.2)
    assert roster.look([row("a:1", "n1")], 0.2) == [WorkerConnected("n1", "a:1", "h")]
    assert not roster.due((1, 0), 100.0)


def test_who_never_tells_a_name_is_looked_for_a_while_and_seldom():
    """For one such all workers were listed at every turn of the manager's loop, without end."""
    roster, looks, told = Roster(), 0, []
    for turn in range(100_000):
        now = turn * 0.001
        if roster.due((1, 0), now):
            looks += 1
            told += roster.look([row("a:1")], now)
    assert told == [StrangerConnected("h", "it tells no name")]
    assert looks <= 160, "ten times a second for as long as a worker may take"
    assert roster.due((2, 0), 100.0)
    assert roster.look([row("a:1"), row("b:2", "n2")], 100.0) == [WorkerConnected("n2", "b:2", "h")]
