"""What preemption should decide, written a second time: plainly, with sets, and without looking at the program.

Nothing here knows of masks, bounds or dynamic programming. It is for small nodes only.
"""

import itertools

from hypothesis import strategies as st

from ctxflow.policies.flextopo.cluster import Hardware, Instance, Location, Node, Preemptor

NUMA, SOCKET, MACHINE, NOWHERE = 3, 2, 1, 0
SCORE = {NUMA: 15, SOCKET: 12, MACHINE: 7, NOWHERE: 0}


def enough(hardware, gpus, groups, want):
    cores = sum(hardware.sizes[group] for group in groups)
    return len(gpus) >= want.gpus and (not hardware.groups or cores >= want.cores)


def closest(hardware, gpus, groups, want):
    """The closest level at which a request fits into sets of free GPUs and core groups."""
    for level, key in ((NUMA, lambda p: p.numa), (SOCKET, lambda p: p.socket)):
        for value in {key(place) for place in (*hardware.gpus, *hardware.groups)} - {None}:
            inside = {gpu for gpu in gpus if key(hardware.gpus[gpu]) == value}
            inside_groups = {group for group in groups if key(hardware.groups[group]) == value}
            if enough(hardware, inside, inside_groups, want):
                return level
    return MACHINE if enough(hardware, gpus, groups, want) else NOWHERE


def span(hardware, gpus, groups):
    places = [hardware.gpus[gpu] for gpu in gpus] + [hardware.groups[group] for group in groups]
    for level, key in ((NUMA, lambda p: p.numa), (SOCKET, lambda p: p.socket)):
        values = {key(place) for place in (*hardware.gpus, *hardware.groups)} - {None}
        if any(all(key(place) == value for place in places) for value in values):
            return level
    return MACHINE


def idle(node):
    gpus = set(range(len(node.hardware.gpus)))
    groups = set(range(len(node.hardware.groups)))
    for instance in node.instances:
        gpus -= set(instance.gpus)
        groups -= set(instance.core_groups)
    return gpus, groups


def level_without(node, victims, want):
    gpus, groups = idle(node)
    for victim in victims:
        gpus |= set(node.instances[victim].gpus)
        groups |= set(node.instances[victim].core_groups)
    return closest(node.hardware, gpus, groups, want)


def best_possible(node, want):
    return closest(node.hardware, set(range(len(node.hardware.gpus))), set(range(len(node.hardware.groups))), want)


def may_go(node, want):
    return [n for n, each in enumerate(node.instances) if each.preemptible and each.priority < want.priority]


def feasible(node, victims, want):
    level = level_without(node, victims, want)
    needed = max(best_possible(node, want), MACHINE) if want.affinity == "guaranteed" else MACHINE
    return level >= needed


def all_feasible(node, want):
    victims = may_go(node, want)
    sets = [s for size in range(1, len(victims) + 1) for s in itertools.combinations(victims, size)]
    return [chosen for chosen in sets if feasible(node, chosen, want)]


def all_minimal(node, want):
    sets = all_feasible(node, want)
    least = min(map(len, sets), default=0)
    return [chosen for chosen in sets if len(chosen) == least]


def reprieved(node, want):
    """Drop all, then let each stay who can, the most important first."""
    gone = set(may_go(node, want))
    if not gone or level_without(node, gone, want) == NOWHERE:
        return None
    for one in sorted(gone, key=lambda n: (-node.instances[n].priority, node.instances[n].started)):
        if level_without(node, gone - {one}, want) != NOWHERE:
            gone.discard(one)
    return tuple(sorted(gone))


def order(nodes, node, victims, want, alpha=0.0, basis="allocation", blind=False):
    """What a candidate is ordered by, least first; fractions are as the notes to the paper have them."""
    lowest = min(
        (nodes_i.priority for each in nodes for n, nodes_i in enumerate(each.instances) if n in may_go(each, want))
    )
    lift = max(0, 1 - lowest)
    chosen = [node.instances[victim] for victim in victims]
    total = sum(victim.priority + lift for victim in chosen)
    if basis == "victims":
        gpus = {gpu for victim in chosen for gpu in victim.gpus}
        level = span(node.hardware, gpus, {group for victim in chosen for group in victim.core_groups})
    else:
        level = level_without(node, victims, want)
    topology = 0.0 if blind or want.affinity is None else SCORE[level] / 15
    score = alpha * (lowest + lift) / total + (1 - alpha) * topology
    highest = max(victim.priority for victim in chosen)
    start = min(victim.started for victim in chosen if victim.priority == highest)
    return (-score, highest + lift, total, len(chosen), -start)


def room(hardware, gpus, groups, want):
    """How many requests fit side by side into sets of free GPUs and core groups, as close together as they must be."""
    everything = set(range(len(hardware.gpus))), set(range(len(hardware.groups)))
    level = max(closest(hardware, *everything, want), MACHINE) if want.affinity == "guaranteed" else MACHINE
    if not enough(hardware, *everything, want):
        return 0
    key = {NUMA: lambda p: p.numa, SOCKET: lambda p: p.socket, MACHINE: lambda p: 0}[level]
    count = 0
    for value in {key(place) for place in (*hardware.gpus, *hardware.groups)} - {None}:
        inside = sum(key(hardware.gpus[gpu]) == value for gpu in gpus)
        cores = sum(hardware.sizes[group] for group in groups if key(hardware.groups[group]) == value)
        limits = [inside // want.gpus] if want.gpus else []
        limits += [cores // want.cores] if want.cores and hardware.groups else []
        count += min(limits, default=0)
    return count


def left_out(nodes, node, got, want, later):
    """The priorities of the later preemptors that a decision leaves without a place, one for each of them."""

    def could_have(each, one):
        gpus, groups = idle(each)
        for n in may_go(each, one):
            gpus |= set(each.instances[n].gpus)
            groups |= set(each.instances[n].core_groups)
        return gpus, groups

    lost = []
    alike = {(e.priority, e.gpus, e.cores, e.affinity): e for e in later}
    for key, one in alike.items():
        if key[0] > want.priority or key[:3] == (want.priority, want.gpus, want.cores):
            continue
        count = sum((e.priority, e.gpus, e.cores, e.affinity) == key for e in later)
        before = sum(room(each.hardware, *could_have(each, one), one) for each in nodes)
        gpus, groups = could_have(node, one)
        taken = room(node.hardware, gpus, groups, one) - room(
            node.hardware, gpus - set(got[0]), groups - set(got[1]), one
        )
        lost += [key[0]] * (min(count, before) - min(count, before - taken))
    return lost


def order_with(nodes, node, victims, got, want, later):
    """The order if those who are left without a place count as victims."""
    score, highest, total, count, _ = order(nodes, node, victims, want)
    lowest = min((each.priority for one in nodes for n, each in enumerate(one.instances) if n in may_go(one, want)))
    lost = [max(priority + max(0, 1 - lowest), 1) for priority in left_out(nodes, node, got, want, later)]
    return score, max([highest, *lost]), total + sum(lost), count + len(lost)


@st.composite
def hardwares(draw):
    sockets = draw(st.integers(1, 2))
    numa = sockets * draw(st.integers(1, 4))
    if draw(st.integers(0, 9)) == 0:
        return Hardware(tuple(Location(None, None) for _ in range(draw(st.integers(1, 4)))))
    cores = draw(st.sampled_from([0, numa * 2, numa * 4, numa * 3 + 1]))
    gpus = draw(st.integers(1, 8))
    return Hardware.regular(sockets=sockets, numa_nodes=numa, gpus=gpus, cores=cores, group_size=2)


@st.composite
def nodes(draw, name="node", kinds=None):
    hardware = draw(kinds if kinds is not None else hardwares())
    gpus = draw(st.permutations(range(len(hardware.gpus))))
    groups = draw(st.permutations(range(len(hardware.groups))))
    instances = []
    for number in range(draw(st.integers(0, 7))):
        takes = draw(st.sampled_from([1, 1, 1, 2, 2, 4, 0]))
        takes_groups = draw(st.integers(0, 3))
        mine, gpus = gpus[:takes], gpus[takes:]
        near, groups = groups[:takes_groups], groups[takes_groups:]
        priority, start = draw(st.sampled_from([-5, 0, 1, 2, 3, 200, 500])), draw(st.integers(0, 3))
        stays = draw(st.integers(0, 7)) == 0
        instances.append(Instance(f"i{number}", priority, tuple(mine), tuple(near), float(start), not stays))
    return Node(name, hardware, tuple(instances))


@st.composite
def requests(draw):
    gpus = draw(st.integers(0, 5))
    cores = draw(st.integers(0 if gpus else 1, 8))
    priority = draw(st.sampled_from([0, 2, 500, 1000, 1000, 1000]))
    affinity = draw(st.sampled_from([None, "guaranteed", "best-effort"]))
    return Preemptor("p", priority, gpus, cores, affinity)
