import math

import pytest
from simulator_data import Clock

from ctxflow.executors.simulated import SimulatedMachine
from ctxflow.simulator import Origin, Part, TreeStaging

MODEL = Part("model", 100.0, "fs")


def staged(part, hosts, **options):
    """When each host has a part, all asking at 0."""
    clock, there = Clock(), {}
    staging = TreeStaging({"c": [part]}, {"fs": Origin(1000.0, 100.0, 10.0)}, peer_bandwidth=100.0, **options)
    staging.attach(clock)
    for host in range(hosts):
        staging.fetch(
            f"w{host}", SimulatedMachine(f"h{host}"), "c", lambda host=host: there.setdefault(host, clock.now)
        )
    return clock, staging, there


@pytest.mark.parametrize("hosts", [1, 2, 4, 8, 13])
def test_with_one_transfer_a_host_the_tree_is_as_deep_as_the_hosts_double(hosts):
    clock, staging, there = staged(MODEL, hosts, fan_out=1, from_origin=1)
    clock.run()
    # Opening the file takes a tenth of a second, a copy a second. The origin sends on, beside the hosts.
    assert len(there) == hosts
    assert max(there.values()) <= 0.1 * (1 + hosts) + 1 + math.ceil(math.log2(hosts))
    assert sum(staging.moved.values()) == pytest.approx(100 * hosts)
    assert hosts == 1 or staging.moved["peers"] > 0


def test_what_is_not_shared_comes_from_the_origin_to_each():
    clock, staging, there = staged(Part("env", 100.0, "fs", shared=False, unpacking=7.0), 10)
    clock.run()
    assert staging.moved == {"fs": pytest.approx(1000), "peers": 0}
    # Ten files at ten a second, then ten transfers that share the filesystem's 1000.
    assert max(there.values()) == pytest.approx(1 + 1 + 7)


def test_a_sender_that_is_lost_is_replaced_and_a_receiver_that_is_lost_frees_its_sender():
    clock, staging, there = staged(MODEL, 8, fan_out=2)
    clock.run(until=1.5)
    [first] = there
    staging.lost(f"w{first}")
    staging.lost("w5")
    clock.run()
    assert there.keys() >= set(range(8)) - {5}


def test_a_second_worker_of_a_host_needs_no_transfer():
    clock, staging, there = staged(MODEL, 1)
    clock.run()
    staging.fetch("sibling", SimulatedMachine("other", host="h0"), "c", lambda: there.setdefault("sibling", clock.now))
    clock.run()
    assert there["sibling"] == there[0]
    staging.lost("w0")
    staging.fetch("third", SimulatedMachine("third", host="h0"), "c", lambda: there.setdefault("third", clock.now))
    clock.run()
    assert there["third"] == there[0], "the sibling keeps the copy"
    assert staging.moved["fs"] == pytest.approx(100)


def test_removed_files_are_brought_anew_and_a_fetch_that_is_stopped_never_ends():
    clock, staging, there = staged(MODEL, 1)
    staging.remove("w0", "c")
    clock.run()
    assert there == {}
    for time in range(2):
        staging.fetch("w0", SimulatedMachine("h0"), "c", lambda time=time: there.setdefault(time, clock.now))
        clock.run()
        staging.remove("w0", "c")
    assert there[1] >= there[0] + 1


def test_an_origin_that_is_not_given_is_named():
    with pytest.raises(ValueError, match="nowhere"):
        TreeStaging({"c": [Part("model", 1.0, "nowhere")]}, {"fs": Origin(1.0)})
