"""Whether and how closely a request fits into what is free of a node, and what exactly it then gets.

The predicate S(P, N) of FlexTopo's Algorithm 2 with topology inside. Pure, on bit masks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.policies.flextopo.cluster import Affinity, Domain, Hardware, Level, Location, Node, Preemptor


class Fit:
    """How closely one request fits into one kind of hardware, and how closely it has to.

    Answers are kept: few sets of free resources differ on nodes of one kind.

    :ivar target: the closest level that the *empty* hardware allows; to get it is a hit. Four GPUs cannot be in one
        NUMA node of an eight-GPU machine with eight, so there it is the socket (the paper's Figure 3 counts so too).
    :ivar required: the level below which a place is none: the target if affinity is guaranteed.

    >>> from ctxflow.policies.flextopo.cluster import Hardware
    >>> fit = Fit(Hardware.regular(sockets=2, numa_nodes=8, gpus=8), gpus=2, cores=0)
    >>> fit.target.name, fit.level(0b00011).name, fit.level(0b10001).name, fit.level(0b1).name
    ('SOCKET', 'SOCKET', 'MACHINE', 'NONE')
    """

    __slots__ = ("_domains", "_levels", "cores", "gpus", "hardware", "required", "target")

    def __init__(self, hardware: Hardware, gpus: int, cores: int, affinity: Affinity | None = None) -> None:
        self.hardware, self.gpus = hardware, gpus
        self.cores = cores if hardware.groups else 0
        self._levels: dict[int, Level] = {}
        self._domains = hardware.domains
        self.target = self.level(hardware.everything)
        self.required = max(self.target, Level.MACHINE) if affinity == "guaranteed" else Level.MACHINE
        # Those that the empty hardware cannot fill are never looked at again.
        self._domains = tuple(domain for domain in hardware.domains if self.fits(hardware.everything, domain))

    @property
    def domains(self) -> Sequence[Domain]:
        """Return those in which the request fits if they are empty, the closest first."""
        return self._domains

    def level(self, free: int) -> Level:
        """Return the closest level at which the request fits into what is free; NONE if it does not."""
        found = self._levels.get(free)
        if found is None:
            fitting = (domain.level for domain in self._domains if self.fits(free, domain))
            found = self._levels[free] = next(fitting, Level.NONE)
        return found

    def fits(self, free: int, domain: Domain) -> bool:
        """Return whether the request fits into what is free of one domain."""
        if (free & domain.gpus).bit_count() < self.gpus:
            return False
        return not self.cores or self.hardware.cores(free & domain.groups) >= self.cores


class Fits:
    """The fits of one request, for every kind of hardware that it meets."""

    def __init__(self, preemptor: Preemptor) -> None:
        self._preemptor = preemptor
        self._found: dict[int, Fit] = {}

    def __getitem__(self, node: Node) -> Fit:
        fit = self._found.get(id(node.hardware))
        if fit is None:
            fit = self._found[id(node.hardware)] = Fit(
                node.hardware, self._preemptor.gpus, self._preemptor.cores, self._preemptor.affinity
            )
        return fit


def allocate(fit: Fit, free: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return what a request gets of what is free: the numbers of GPUs and of core groups, neighbours beside each other.

    It is as close together as it can be; of equally close domains the one is taken that it fills best; in it, as few
    NUMA nodes as possible, and the core groups near the GPUs first.

    >>> from ctxflow.policies.flextopo.cluster import Hardware
    >>> allocate(Fit(Hardware.regular(sockets=2, numa_nodes=8, gpus=8), gpus=2, cores=0), 0b11101001)
    ((0, 3), ())
    """
    level = fit.level(free)
    if level is Level.NONE:
        return None
    hardware = fit.hardware
    fitting = [d for d in fit.domains if d.level == level and fit.fits(free, d)]
    chosen = min(fitting, key=lambda domain: (free & domain.gpus).bit_count())
    gpus = _nearest(_numbers(free & chosen.gpus), hardware.gpus)[: fit.gpus]
    near = {hardware.gpus[number].numa for number in gpus}
    sockets = {hardware.gpus[number].socket for number in gpus}
    groups, cores = [], 0
    for number in sorted(
        _nearest(_numbers((free & chosen.groups) >> len(hardware.gpus)), hardware.groups),
        key=lambda n: (hardware.groups[n].numa not in near, hardware.groups[n].socket not in sockets),
    ):
        if cores >= fit.cores:
            break
        groups.append(number)
        cores += hardware.sizes[number]
    return tuple(_in_order(gpus, hardware.gpus)), tuple(_in_order(groups, hardware.groups))


def _numbers(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _nearest(numbers: list[int], places: Sequence[Location]) -> list[int]:
    """Return socket by socket and NUMA node by NUMA node, those with most to give first."""
    in_socket: dict[int | None, int] = {}
    in_numa: dict[Location, int] = {}
    for number in numbers:
        place = places[number]
        in_socket[place.socket] = in_socket.get(place.socket, 0) + 1
        in_numa[place] = in_numa.get(place, 0) + 1

    def order(number: int) -> tuple[int, int, int, int, int]:
        place = places[number]
        return -in_socket[place.socket], _known(place.socket), -in_numa[place], _known(place.numa), number

    return sorted(numbers, key=order)


def _in_order(numbers: Sequence[int], places: Sequence[Location]) -> list[int]:
    return sorted(numbers, key=lambda n: (_known(places[n].socket), _known(places[n].numa), n))


def _known(number: int | None) -> int:
    """Return numbers that are not known come last."""
    return 1 << 30 if number is None else number
