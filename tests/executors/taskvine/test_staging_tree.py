"""The transfer tree: by examples, and against a random TaskVine that loses workers, links and reports."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxflow.executors.taskvine.worker_transfers import Cancel, Fetch, Link, Seed, Tree


def seeded_on(tree, *workers):
    """A tree in which each of the workers, the first a seeder, has fetched file "d" on a host of its own."""
    for worker in workers:
        tree.want(worker, f"host of {worker}", "d")
    tree.seeded(workers[0], "d", 1)
    for worker in workers:
        tree.arrived(worker, "d", f"/{worker}")
    return tree


def test_one_worker_per_host_fetches_and_its_siblings_link():
    tree = Tree()
    assert tree.want("a1", "a", "d") == [Seed("d", "a1", 1)]
    assert [tree.want(worker, worker[0], "d") for worker in ("a2", "b1", "b2", "c1")] == [[], [], [], []]
    assert tree.seeded("a1", "d", 1) == [Fetch("d", "a1", 1), Fetch("d", "b1", 1), Fetch("d", "c1", 1)]
    assert tree.arrived("b1", "d", "/b1", generation=1) == [Link("d", "b2", "/b1")]
    assert tree.arrived("b2", "d", "/b2") == []
    assert tree.want("b3", "b", "d") == [Link("d", "b3", "/b1")]
    assert tree.want("e1", "e", "d") == [Fetch("d", "e1", 1)]
    assert tree.has("b2", "d")
    assert not tree.has("b3", "d")


def test_asking_again_changes_nothing():
    tree = Tree()
    tree.want("a", "host", "d")
    assert tree.want("a", "host", "d") == []
    tree.seeded("a", "d", 1)
    tree.arrived("a", "d", "/a")
    assert tree.want("a", "host", "d") == []


def test_a_worker_does_not_change_its_host():
    tree = Tree()
    tree.want("a", "host", "d")
    with pytest.raises(ValueError, match="worker a is on host 'host'"):
        tree.want("a", "elsewhere", "e")


def test_a_failed_link_becomes_a_fetch_and_is_not_tried_again_on_any_file():
    tree = seeded_on(Tree(), "a1")
    assert tree.want("a2", "host of a1", "d") == [Link("d", "a2", "/a1")]
    assert tree.failed("a2", "d", "link") == [Fetch("d", "a2", 1)]
    assert tree.want("a3", "host of a1", "d") == [Link("d", "a3", "/a1")]
    tree.want("a2", "host of a1", "e")
    tree.seeded("a2", "e", 1)
    tree.arrived("a2", "e", "/a2/e")
    assert tree.want("a1", "host of a1", "e") == [Fetch("e", "a1", 1)]


def test_after_a_link_from_a_sibling_lost_meanwhile_the_worker_fetches_and_others_link_from_it():
    tree = seeded_on(Tree(), "a1", "b1")
    tree.want("a2", "host of a1", "d")
    assert tree.lost("a1") == []
    assert tree.failed("a2", "d", "link") == [Fetch("d", "a2", 1)]
    tree.arrived("a2", "d", "/a2")
    assert tree.want("a3", "host of a1", "d") == [Link("d", "a3", "/a2")]


def test_a_worker_that_stays_does_not_remember_those_with_whom_links_failed_and_that_are_gone():
    tree = seeded_on(Tree(), "stays")
    for number in range(20):
        tree.want(f"w{number}", "host of stays", "d")
        tree.failed(f"w{number}", "d", "link")
        assert tree._unlinkable["stays"] == {f"w{number}"}
        tree.lost(f"w{number}")
    assert not tree._unlinkable["stays"]


def test_a_failed_fetch_is_given_up_and_a_sibling_takes_over():
    tree = seeded_on(Tree(), "a1")
    assert tree.want("b1", "b", "d") == [Fetch("d", "b1", 1)]
    assert tree.want("b2", "b", "d") == []
    assert tree.failed("b1", "d", "fetch", generation=1) == [Fetch("d", "b2", 1)]
    assert tree.want("b1", "b", "d") == []
    assert tree.arrived("b2", "d", "/b2") == [Link("d", "b1", "/b2")]


def test_a_failed_seed_goes_to_the_next_who_waits():
    tree = Tree()
    tree.want("a", "a", "d")
    tree.want("b", "b", "d")
    assert tree.failed("a", "d", "seed", generation=1) == [Seed("d", "b", 2)]
    assert tree.seeded("a", "d", 1) == []
    assert tree.want("a", "a", "d") == []
    assert tree.seeded("b", "d", 2) == [Fetch("d", "b", 2), Fetch("d", "a", 2)]


def test_a_lost_seeder_is_replaced():
    tree = Tree()
    tree.want("a", "a", "d")
    tree.want("b", "b", "d")
    assert tree.lost("a") == [Seed("d", "b", 2)]
    assert tree.seeded("a", "d", 1) == tree.arrived("a", "d", "/a") == tree.failed("a", "d", "seed") == []


def test_a_lost_fetcher_is_replaced_on_its_host():
    tree = seeded_on(Tree(), "a")
    tree.want("b1", "b", "d")
    tree.want("b2", "b", "d")
    assert tree.lost("b1") == [Fetch("d", "b2", 1)]


def test_when_the_last_replica_is_lost_all_starts_over():
    tree = Tree()
    for worker in ("a1", "b1", "c1", "c2"):
        tree.want(worker, worker[0], "d")
    tree.seeded("a1", "d", 1)
    assert tree.lost("a1") == [Cancel("d", "b1", 1), Cancel("d", "c1", 1), Seed("d", "b1", 2)]
    assert tree.arrived("b1", "d", "/b1", generation=1) == tree.failed("c1", "d", "fetch", generation=1) == []
    assert tree.seeded("b1", "d", 2) == [Fetch("d", "b1", 2), Fetch("d", "c2", 2)]


def test_reports_about_a_cancelled_fetch_are_not_taken_for_the_next_one():
    tree = Tree()
    for worker in ("a", "b", "c"):
        tree.want(worker, worker, "d")
    tree.seeded("a", "d", 1)
    tree.lost("a")
    assert tree.failed("b", "d", "seed", generation=1) == []
    assert tree.seeded("b", "d", 2) == [Fetch("d", "b", 2), Fetch("d", "c", 2)]
    assert tree.failed("c", "d", "fetch", generation=1) == tree.arrived("c", "d", "/c", generation=1) == []
    assert not tree.has("c", "d")
    assert tree.want("c2", "c", "d") == []
    assert tree.arrived("c", "d", "/c", generation=2) == [Link("d", "c2", "/c")]


def test_who_may_not_link_from_the_one_holder_does_not_hold_up_the_others():
    tree = Tree()
    tree.want("near", "h", "e")
    tree.seeded("near", "e", 1)
    tree.arrived("near", "e", "/near/e")
    tree.want("far", "h", "e")
    tree.failed("far", "e", "link")  # "near" and "far" link no more
    tree.want("first", "h", "d")
    tree.want("elsewhere", "i", "d")
    tree.seeded("first", "d", 1)
    tree.arrived("first", "d", "/first")
    tree.arrived("elsewhere", "d", "/elsewhere")
    assert tree.want("near", "h", "d") == [Link("d", "near", "/first")]
    assert tree.want("slow", "h", "d") == [Link("d", "slow", "/first")]
    assert tree.failed("slow", "d", "link") == [Fetch("d", "slow", 1)]
    assert tree.lost("first") == []
    assert tree.want("far", "h", "d") == tree.want("other", "h", "d") == []
    assert tree.arrived("near", "d", "/near/d") == [Link("d", "other", "/near/d")]
    assert tree.arrived("other", "d", "/other") == [Link("d", "far", "/other")]


def test_a_linked_holder_is_no_replica_but_its_siblings_link_from_it():
    tree = seeded_on(Tree(), "a1")
    tree.want("a2", "host of a1", "d")
    tree.arrived("a2", "d", "/a2")
    tree.want("b1", "b", "d")
    assert tree.lost("a1") == [Cancel("d", "b1", 1), Seed("d", "b1", 2)]
    assert tree.want("a3", "host of a1", "d") == [Link("d", "a3", "/a2")]


def test_after_a_failed_link_a_fetcher_cut_off_links_from_another_sibling_and_is_not_seeded():
    tree = seeded_on(Tree(), "a1")
    for worker in ("a2", "a3"):
        tree.want(worker, "host of a1", "d")
    tree.arrived("a2", "d", "/a2")
    tree.failed("a3", "d", "link")
    tree.want("b1", "b", "d")
    orders = tree.lost("a1")
    assert orders == [Cancel("d", "a3", 1), Cancel("d", "b1", 1), Seed("d", "b1", 2), Link("d", "a3", "/a2")]


def test_with_nobody_waiting_the_next_who_asks_is_seeded():
    tree = seeded_on(Tree(), "a")
    assert tree.lost("a") == []
    assert tree.want("b", "b", "d") == [Seed("d", "b", 2)]


def test_reports_about_the_unknown_change_nothing():
    tree = Tree()
    assert tree.seeded("a", "d", 1) == tree.arrived("a", "d", "/a") == tree.failed("a", "d", "link") == []
    assert tree.lost("a") == []
    assert not tree.has("a", "d")


def test_with_one_transfer_per_source_a_host_takes_one_copy_and_all_take_one_and_ceil_log2_rounds():
    hosts, siblings = 13, 2
    tree = Tree()
    seeds = [order for i in range(hosts * (1 + siblings)) for order in tree.want(f"w{i}", i % hosts, "d")]
    assert seeds == [Seed("d", "w0", 1)]
    own, *fetches = tree.seeded("w0", "d", 1)
    assert own == Fetch("d", "w0", 1)
    links = tree.arrived("w0", "d", "/w0")
    rounds, sources = 1, 1
    while fetches:
        now, fetches = fetches[:sources], fetches[sources:]
        links += [link for fetch in now for link in tree.arrived(fetch.worker, "d", f"/{fetch.worker}")]
        rounds, sources = rounds + 1, sources + len(now)
    assert sources == hosts
    assert rounds == 1 + math.ceil(math.log2(hosts))
    assert len(links) == hosts * siblings
    assert all(isinstance(link, Link) for link in links)


def test_who_finds_a_file_in_its_hosts_cache_serves_its_siblings_and_is_sent_nothing():
    tree = Tree()
    assert tree.want("a1", "a", "d") == [Seed("d", "a1", 1)]
    assert tree.want("a2", "a", "d") == tree.want("b1", "b", "d") == []
    assert tree.found("a3", "a", "d", "/a3") == [Link("d", "a2", "/a3")]
    assert tree.found("b1", "b", "d", "/b1") == []
    assert tree.has("b1", "d") and not tree.has("a1", "d")
    assert tree.want("b1", "b", "d") == []
    assert tree.want("b2", "b", "d") == [Link("d", "b2", "/b1")]
    assert tree.seeded("a1", "d", 1) == [Fetch("d", "a1", 1)]


HOSTS = ("a", "b", "c")
DIGESTS = ("d", "e")
HOW = {Seed: "seed", Fetch: "fetch", Link: "link"}


def validate(tree):
    """Check the table's invariants."""
    assert set(tree._unlinkable).union(*tree._unlinkable.values()) <= tree._host_of.keys(), "a link with a lost worker"
    for file in tree._files.values():
        assert not (file.seeder and file.replicas), "a seed beside replicas"
        assert file.replicas <= tree._host_of.keys(), "a replica on a lost worker"
        assert file.hosts.keys() <= set(tree._host_of.values()), "a host without workers"
        for host, siblings in file.hosts.items():
            workers = sorted([*siblings.holders, *siblings.outstanding, *siblings.waiting])
            assert workers == sorted({worker for worker in workers if tree._host_of[worker] == host})
            assert not siblings.waiting or siblings.outstanding or file.seeder, "somebody waits for nothing"
            for worker, order in siblings.outstanding.items():
                assert isinstance(order, Link) or order.generation == file.generation, "an earlier generation"
                assert isinstance(order, Seed) == (worker == file.seeder), "a seed beside another"
                assert file.replicas or not isinstance(order, Fetch), "a fetch that can never end"


class RandomTaskVine(RuleBasedStateMachine):
    """Carries the orders out as TaskVine and the workers would, in any order, and checks each order as it comes."""

    def __init__(self):
        super().__init__()
        self.tree = Tree()
        self.host_of = {}  # live workers
        self.names = 0
        self.running = {}  # (worker, digest) -> order
        self.ended = []  # orders whose late reports may still come
        self.wanted = set()  # (worker, digest), until given up
        self.cached = {}  # (worker, digest) -> path
        self.replicas = {}  # (digest, generation) -> workers that have the temp file
        self.generation = dict.fromkeys(DIGESTS, 0)
        self.apart = set()  # pairs of siblings with a failed link, in both directions
        self.ever_failed_a_link = set()

    def carry_out(self, orders):
        for order in orders:
            key = (order.worker, order.digest)
            assert order.worker in self.host_of, f"{order} for a lost worker"
            if isinstance(order, Cancel):
                assert self.running.pop(key) == Fetch(order.digest, order.worker, order.generation)
                assert not self.replicas[order.digest, order.generation], f"{order} although it could end"
                self.ended.append(Fetch(order.digest, order.worker, order.generation))
                continue
            assert key not in self.running, f"{order} beside {self.running[key]}"
            assert key in self.wanted, f"{order} unasked"
            assert key not in self.cached, f"{order} for who has it"
            {Seed: self.check_seed, Fetch: self.check_fetch, Link: self.check_link}[type(order)](order)
            self.running[key] = order

    def siblings(self, worker):
        return [other for other, host in self.host_of.items() if host == self.host_of[worker] and other != worker]

    def check_transfer(self, order):
        for sibling in self.siblings(order.worker):
            if {sibling, order.worker} & self.ever_failed_a_link:
                continue
            if order.worker in self.replicas.get((order.digest, order.generation), ()):
                continue  # A seeder has it at hand, though a sibling may have found it meanwhile.
            assert (sibling, order.digest) not in self.cached, f"{order} beside a holder"
            assert not isinstance(self.running.get((sibling, order.digest)), (Seed, Fetch)), f"{order} beside another"

    def check_seed(self, order):
        self.check_transfer(order)
        assert order.generation == self.generation[order.digest] + 1
        self.generation[order.digest] = order.generation
        for other in self.running.values():
            assert other.digest != order.digest or isinstance(other, Link), f"{order} beside {other}"
        assert not any(there for (digest, _), there in self.replicas.items() if digest == order.digest)
        self.replicas[order.digest, order.generation] = set()

    def check_fetch(self, order):
        self.check_transfer(order)
        assert order.generation == self.generation[order.digest]
        assert self.replicas[order.digest, order.generation], f"{order} from nobody"

    def check_link(self, order):
        sources = [
            other for other in self.siblings(order.worker) if self.cached.get((other, order.digest)) == order.path
        ]
        assert len(sources) == 1, f"{order} from no live sibling"
        assert (sources[0], order.worker) not in self.apart, f"{order} has failed before"

    def finish(self, key):
        order = self.running.pop(key)
        worker, digest = key
        self.ended.append(order)
        if isinstance(order, Seed):
            self.replicas[digest, order.generation].add(worker)
            self.carry_out(self.tree.seeded(worker, digest, order.generation))
            return
        if isinstance(order, Fetch):
            assert self.replicas[digest, order.generation], "a fetch that never ends was not cancelled"
            self.replicas[digest, order.generation].add(worker)
        self.names += 1
        self.cached[key] = f"/{worker}/{self.names}"
        self.carry_out(self.tree.arrived(worker, digest, self.cached[key], getattr(order, "generation", None)))

    def fail(self, key):
        order = self.running.pop(key)
        worker, digest = key
        self.ended.append(order)
        if isinstance(order, Link):
            self.ever_failed_a_link.add(worker)
            for other in self.siblings(worker):
                if self.cached.get((other, digest)) == order.path:
                    self.apart |= {(other, worker), (worker, other)}
        else:
            self.wanted.discard(key)
        generation = getattr(order, "generation", None)
        self.carry_out(self.tree.failed(worker, digest, HOW[type(order)], generation))

    @rule(host=st.sampled_from(HOSTS), digests=st.sampled_from([("d",), ("e",), DIGESTS]))
    def join(self, host, digests):
        self.names += 1
        worker = f"{host}{self.names}"
        self.host_of[worker] = host
        for digest in digests:
            self.wanted.add((worker, digest))
            self.carry_out(self.tree.want(worker, host, digest))

    @precondition(lambda self: self.host_of)
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def ask(self, data, digest):
        worker = data.draw(st.sampled_from(sorted(self.host_of)))
        self.wanted.add((worker, digest))
        self.carry_out(self.tree.want(worker, self.host_of[worker], digest))

    @precondition(lambda self: self.host_of)
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS))
    def find(self, data, digest):
        """A worker has it from its host's cache, which it asked before it would be sent the file, or meanwhile."""
        worker = data.draw(st.sampled_from(sorted(self.host_of)))
        key = (worker, digest)
        if key in self.cached:
            return
        self.wanted.add(key)
        if key not in self.running:
            self.names += 1
            self.cached[key] = f"/{worker}/{self.names}"
        self.carry_out(self.tree.found(worker, self.host_of[worker], digest, self.cached.get(key, "/unused")))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_well(self, data):
        self.finish(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_badly(self, data):
        self.fail(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: any(isinstance(order, Link) for order in self.running.values()))
    @rule(data=st.data())
    def fail_a_link(self, data):
        links = [key for key, order in self.running.items() if isinstance(order, Link)]
        self.fail(data.draw(st.sampled_from(sorted(links))))

    @precondition(lambda self: self.host_of)
    @rule(data=st.data())
    def lose(self, data):
        """Often a replica: they are the ones that hurt."""
        replicas = sorted({worker for there in self.replicas.values() for worker in there})
        worker = data.draw(st.sampled_from(replicas or sorted(self.host_of)) | st.sampled_from(sorted(self.host_of)))
        del self.host_of[worker]
        for key in [key for key in self.running if key[0] == worker]:
            self.ended.append(self.running.pop(key))
        self.wanted = {key for key in self.wanted if key[0] != worker}
        self.cached = {key: path for key, path in self.cached.items() if key[0] != worker}
        for there in self.replicas.values():
            there.discard(worker)
        self.carry_out(self.tree.lost(worker))

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), well=st.booleans())
    def report_late(self, data, well):
        """A report that comes twice, after a cancel, or from the dead, while another order may be outstanding."""
        tempting = [order for order in self.ended if (order.worker, order.digest) in self.running]
        order = data.draw(st.sampled_from(tempting or self.ended))
        if isinstance(order, Link):
            if isinstance(self.running.get((order.worker, order.digest)), Link):
                return  # Links are never taken back: a live worker reports each once.
            if isinstance(self.running.get((order.worker, order.digest)), Fetch) and well:
                return  # Nor is a link's end told apart from a fetch's.
        elif order == self.running.get((order.worker, order.digest)):
            return
        generation = getattr(order, "generation", None)
        if not well:
            orders = self.tree.failed(order.worker, order.digest, HOW[type(order)], generation)
        elif isinstance(order, Seed):
            orders = self.tree.seeded(order.worker, order.digest, generation)
        else:
            orders = self.tree.arrived(order.worker, order.digest, "/late", generation)
        assert orders == []

    @rule()
    def all_ends_well(self):
        """If nothing more fails, whoever asked and lives has it in the end."""
        while self.running:
            self.finish(next(iter(self.running)))
        assert self.wanted == set(self.cached)

    @invariant()
    def agrees(self):
        validate(self.tree)
        for digest in DIGESTS:
            assert {(worker, digest) for worker in self.host_of if self.tree.has(worker, digest)} == {
                key for key in self.cached if key[1] == digest
            }
            busy = any(key[1] == digest for key in [*self.cached, *self.running, *self.wanted])
            hosts = self.tree._files[digest].hosts.values() if digest in self.tree._files else ()
            assert any(each.holders or each.outstanding or each.waiting for each in hosts) == busy

    def teardown(self):
        self.all_ends_well()


TestRandomTaskVine = RandomTaskVine.TestCase
TestRandomTaskVine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
