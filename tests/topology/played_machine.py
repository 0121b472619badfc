"""Machines that are not here: a /sys and /proc in a folder, an NVML that says what a test wants, and topologies."""

import types

from hypothesis import strategies as st

from ctxflow.topology import Core, CoreGroup, Gpu, NumaNode, Topology


def machine(root, *, sockets=2, numa=8, cores=64, threads=1, buses=(), numa_nodes_of_buses=None):
    """Write a machine's /sys: `numa` 0 for a kernel that knows no NUMA; GPUs by their PCI addresses."""
    cpus = cores * threads
    put(root, "sys/devices/system/cpu/online", f"0-{cpus - 1}")
    for cpu in range(cpus):
        core = cpu % cores
        place = f"sys/devices/system/cpu/cpu{cpu}/topology"
        put(root, f"{place}/physical_package_id", core * sockets // cores if sockets else -1)
        put(root, f"{place}/thread_siblings_list", ",".join(str(core + n * cores) for n in range(threads)))
    if numa:
        put(root, "sys/devices/system/node/online", f"0-{numa - 1}" if numa > 1 else "0")
        for node in range(numa):
            first, last = node * cores // numa, (node + 1) * cores // numa - 1
            spans = [f"{first + n * cores}-{last + n * cores}" for n in range(threads)]
            put(root, f"sys/devices/system/node/node{node}/cpulist", ",".join(spans))
    for number, bus in enumerate(buses):
        near = number if numa_nodes_of_buses is None else numa_nodes_of_buses[number]
        put(root, f"sys/bus/pci/devices/{bus}/vendor", "0x10de")
        put(root, f"sys/bus/pci/devices/{bus}/class", "0x030200")
        put(root, f"sys/bus/pci/devices/{bus}/numa_node", near)
    return root


def put(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


BUSES = [f"0000:{0x11 + 0x10 * number:02x}:00.0" for number in range(8)]


class Nvml:
    """As the module pynvml behaves: a library to open, handles, errors."""

    class NVMLError(Exception):
        pass

    def __init__(self, cards, starts=True):
        self.cards, self.starts, self.open = cards, starts, 0

    def nvmlInit(self):
        if not self.starts:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        assert self.open, "NVML is asked before it is opened"
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.cards[index] is None:
            raise self.NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle[0]}"

    def nvmlDeviceGetName(self, handle):
        return handle[1].encode()

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(total=24564 << 20)

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=f"0000{handle[2]}".upper().encode())


def cards(count, model="NVIDIA GeForce RTX 4090"):
    return [(f"{number:08x}-aaaa", model, BUSES[number]) for number in range(count)]


@st.composite
def topologies(draw):
    """Anything that could be a machine's topology."""
    sockets = tuple(range(draw(st.integers(1, 3))))
    nodes = tuple(NumaNode(n, draw(st.sampled_from([None, *sockets]))) for n in range(draw(st.integers(0, 4))))
    numas = [None, *(node.id for node in nodes)]
    users = st.sampled_from([None, "alice", "bob 12.0", 'x "y" \\z'])
    groups, core = [], 0
    for number in range(draw(st.integers(0, 4))):
        members = tuple(Core(core + n, draw(users)) for n in range(draw(st.integers(1, 4))))
        core += len(members)
        numa = draw(st.sampled_from(numas))
        socket = next((node.socket for node in nodes if node.id == numa), None)
        groups.append(CoreGroup(number, draw(st.sampled_from(sockets)) if socket is None else socket, numa, members))
    gpus = tuple(
        Gpu(
            number,
            draw(st.sampled_from([None, f"GPU-{number:08x}-1"])),
            draw(st.sampled_from([None, "NVIDIA A10", "NVIDIA H100 80GB HBM3"])),
            draw(st.sampled_from([None, 24564])),
            draw(st.sampled_from(numas)),
            draw(st.sampled_from([None, BUSES[number]])),
            draw(users),
        )
        for number in range(draw(st.integers(0, 4)))
    )
    problems = tuple(draw(st.lists(st.sampled_from(["one thing", 'another: "x"']), unique=True)))
    return Topology("machine", sockets, nodes, tuple(groups), gpus, problems)
