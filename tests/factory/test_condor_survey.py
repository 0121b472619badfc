"""Which machines of a pool will do, by their ads and HTCondor's own ClassAds. A real pool: tests/cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.factory.condor_machines import places_of
from ctxflow.factory.condor_survey import ask, need_of, refusal_of, survey_of
from ctxflow.factory.provider import WorkerJob

classad2 = pytest.importorskip("classad2", reason="HTCondor's Python bindings are not installed")
GB = 10**9


def job(gpus: int = 1, cores: int = 1, memory: int = 4 * GB, disk: int = 10 * GB, **options: Any) -> WorkerJob:
    return WorkerJob("any", ["worker"], cores=cores, memory=memory, disk=disk, gpus=gpus, options=options)


def pslot(host: str, models: str, used: int = 0, **more: str) -> list[Any]:
    """A host with GPUs as HTCondor 25 advertises it, of which some are used: the slot's ad, and dynamic slots' ads."""
    names = [f"GPU-{host}{number}" for number in range(len(models.split()))]
    gpus = {
        f"GPUs_{name.replace('-', '_')}": f'[ Id = "{name}"; DeviceName = "{model}"; Capability = {model[1:]}.5 ]'
        for name, model in zip(names, models.split(), strict=True)
    }
    common = {"Machine": f'"{host}"', "MyAddress": f'"<{host}:1>"', "OpSys": '"LINUX"', "State": '"Unclaimed"'}
    parent = {
        **common, "PartitionableSlot": "true", "TotalSlotCpus": "6", "TotalSlotMemory": "30720",
        "TotalSlotDisk": "60000000", "TotalSlotGPUs": str(len(names)), "Cpus": str(6 - used), "Memory": "30720",
        "Disk": "60000000", "GPUs": str(len(names) - used), "Start": "true",
        "AssignedGPUs": f'"{",".join(names)}"', "AvailableGPUs": f"{{ {', '.join(list(gpus)[used:])} }}", **more,
    }  # fmt: skip
    # The collector sends, of a projection, only the GPUs that AvailableGPUs refers to.
    parent |= dict(list(gpus.items())[used:])
    ads = [{**parent, "Name": f'"slot1@{host}"'}]
    for name, text in list(gpus.items())[:used]:
        ads.append(
            {**common, "DynamicSlot": "true", "State": '"Claimed"', "AvailableGPUs": f"{{ {name} }}", name: text}
        )
    return [ad_of(ad) for ad in ads]


def static(name: str, state: str = "Unclaimed", **more: str) -> list[Any]:
    """A static slot with one GPU as HTCondor 8 advertised it."""
    ad = {
        "Name": f'"{name}"', "Machine": f'"{name}"', "State": f'"{state}"', "Cpus": "2", "Memory": "16000",
        "Disk": "20000000", "GPUs": "1", "AssignedGPUs": '"CUDA0"', "CUDADeviceName": '"Tesla K40"',
        "CUDACapability": "3.5", **more,
    }  # fmt: skip
    return [ad_of(ad)]


def ad_of(values: dict[str, str]) -> Any:
    return classad2.ClassAd("[" + "; ".join(f"{key} = {value}" for key, value in values.items()) + "]")


POOL = [*pslot("h1", "A8 A8 H9"), *pslot("h2", "A8 P6", used=1), *pslot("h3", "P6", used=1), *pslot("h4", "")]


def test_machines_count_whoever_uses_them():
    found = survey_of(POOL, job())
    assert (found.machines, found.free, found.workers) == (3, 2, 6)
    assert found.gpu_models == {"A8": 3, "H9": 1, "P6": 2}
    assert found.advice == () and found.may_submit
    without = survey_of(POOL, job(gpus=0))
    assert (without.machines, without.free, without.gpu_models) == (4, 4, {})
    assert without.workers == 4 * 6


@pytest.mark.parametrize(
    ("asked", "machines", "free", "workers", "models"),
    [
        (job(require_gpus='DeviceName == "A8"'), 2, 1, 3, {"A8": 3}),
        (job(require_gpus="Capability > 7"), 2, 1, 4, {"A8": 3, "H9": 1}),
        (job(require_gpus="Capability < 7"), 2, 1, 2, {"P6": 2}),
        (job(gpus=2), 2, 1, 2, {"A8": 3, "H9": 1, "P6": 1}),
        (job(gpus=2, require_gpus='DeviceName == "A8"'), 1, 1, 1, {"A8": 2}),
        (job(requirements='Machine == "h2"'), 1, 1, 2, {"A8": 1, "P6": 1}),
        (job(requirements='TARGET.Machine =!= "h1" && regexp("h[12]", Machine)'), 1, 1, 2, {"A8": 1, "P6": 1}),
        (job(requirements="Memory >= RequestMemory * 8"), 3, 2, 6, {"A8": 3, "H9": 1, "P6": 2}),
        (job(requirements="Memory >= MY.Wish", submit={"+Wish": "99999"}), 0, 0, 0, {}),
        (job(cores=3, gpus=0), 4, 4, 8, {}),
        (job(cores=6, gpus=0), 4, 2, 4, {}),
        (job(memory=30 * GB), 3, 2, 3, {"A8": 3, "H9": 1, "P6": 2}),
        (job(disk=30 * GB), 3, 2, 5, {"A8": 3, "H9": 1, "P6": 2}),
    ],
)  # fmt: skip
def test_what_will_do(asked, machines, free, workers, models):
    found = survey_of(POOL, asked)
    assert (found.machines, found.free, found.workers, found.gpu_models) == (machines, free, workers, models)


def test_machines_on_which_nobody_is_wanted_are_none():
    found = survey_of(POOL, replace(job(require_gpus='DeviceName == "A8"'), excluded=("H2", "h9")))
    assert (found.machines, found.workers) == (1, 2)
    found = survey_of(POOL, replace(job(), excluded=("h1", "h2", "h3", "h4")))
    assert found.machines == 0 and "took them for bad" in found.advice[0]


def test_static_slots_and_older_names():
    pool = [*static("s1"), *static("s2", "Claimed"), *static("s3", "Owner"), *static("s4", GPUs="0", AssignedGPUs='""')]
    found = survey_of(pool, job(require_gpus='DeviceName == "Tesla K40" && Capability >= 3.5'))
    assert (found.machines, found.free, found.workers, found.gpu_models) == (3, 1, 3, {"Tesla K40": 3})
    assert survey_of(pool, job(require_gpus="Capability > 4")).machines == 0


def test_a_machine_whose_owner_refuses_is_not_free():
    for start, free in (("false", 0), ('TARGET.Owner == "bob the owner"', 0), ("TARGET.NoSuch > 3", 1), ("true", 1)):
        found = survey_of(pslot("h1", "A8", Start=start), job())
        assert (found.machines, found.free) == (1, free), start
    assert survey_of(pslot("h1", "A8", State='"Drained"'), job()).free == 0


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (job(gpus=4), "no machine has 4 GPUs: the most is 3; write gpus = 3 or less"),
        (job(cores=7), "no machine has 7 cores: the most is 6; write cores = 6 or less"),
        (job(memory=99 * GB), "has 99 GB of memory: the most is 32.2; write memory_gb = 32.2 or less"),
        (job(disk=99 * GB), "no machine has 99 GB of disk: the most is 61.4; write disk_gb = 61.4 or less"),
        (job(require_gpus='DeviceName == "B2"'), "no GPU is an 'B2': the pool has 3 A8, 2 P6, 1 H9"),
        (job(require_gpus="Capability > 10"), "meets Capability > 10 in require_gpus: Capability is from 6.5 to 9.5"),
        (job(require_gpus="DeviceNam == 3"), "nothing is said of DeviceNam: did you mean 'DeviceName'?"),
        (job(require_gpus="Capability > 8 && Capability < 8.2"), "met by some GPU, and no GPU meets all"),
        (job(requirements='Machine == "h9"'), 'Machine == "h9" in requirements: Machine is h1, h2, h3, h4'),
        (job(requirements="false"), "no machine meets false in requirements: it is never true: correct it"),
        (job(requirements="Sandbox > 3"), "nothing is said of Sandbox: see condor_status -long"),
        (job(image="docker://debian"), "no machine runs such containers (HasDockerURL): leave image out"),
        (job(requirements='Machine == "h3"', require_gpus='DeviceName == "H9"'),
         'meets all that is asked: of 4, Machine == "h3" by 1, 1 GPU by 3, 1 GPU with DeviceName == "H9" by 1'
         '; without Machine == "h3" there would be 1'),
    ],
)  # fmt: skip
def test_the_requirement_that_excludes_all_machines_is_named(asked, advice):
    found = survey_of(POOL, asked)
    assert (found.machines, found.free, found.workers) == (0, 0, 0)
    assert advice in "; ".join(found.advice)


def test_a_pool_without_machines_or_gpus_says_so():
    assert "the pool has no machine" in survey_of([], job()).advice[0]
    assert "no machine has a GPU: write gpus = 0" in survey_of(pslot("h1", ""), job()).advice[0]
    busy = [*pslot("h1", "A8", used=1), *pslot("h2", "A8", used=1)]
    assert survey_of(busy, job()).advice == ("all 2 machines that will do are busy now: workers wait until others end",)
    assert survey_of(busy[:2], job()).advice[0].startswith("the one machine that will do is busy now: ")


def test_what_condor_submit_adds_counts_unless_the_author_speaks_of_it():
    implied = ['Arch == "X86_64"', 'OpSys == "LINUX"']
    assert survey_of(pslot("h1", "A8", Arch='"X86_64"'), job(), implied).machines == 1
    arm = pslot("h1", "A8", Arch='"aarch64"')
    refused = survey_of(arm, job(), implied)
    assert refused.machines == 0
    assert refused.advice[0] == 'no machine meets what HTCondor asks by itself, Arch == "X86_64": Arch is aarch64'
    assert survey_of(arm, job(requirements='Arch == "aarch64"'), implied).machines == 1


@settings(max_examples=60, deadline=None)
@given(
    hosts=st.lists(st.tuples(st.lists(st.sampled_from(["A8", "H9", "P6"]), max_size=4), st.integers(0, 4)), max_size=5),
    gpus=st.integers(0, 3),
    capability=st.sampled_from([0, 7, 9]),
)
def test_the_counts_add_up(hosts, gpus, capability):
    pool = [
        ad
        for number, (models, used) in enumerate(hosts)
        for ad in pslot(f"h{number}", " ".join(models), used=min(used, len(models)))
    ]
    found = survey_of(pool, job(gpus=gpus, require_gpus=f"Capability > {capability}" if gpus else None))
    good = [[model for model in models if int(model[1:]) + 0.5 > capability] for models, _ in hosts]
    fitting = [models for models in good if len(models) >= gpus]
    assert found.machines == len(fitting)
    assert 0 <= found.free <= found.machines <= found.workers
    assert sum(found.gpu_models.values()) == (sum(map(len, fitting)) if gpus else 0)
    assert bool(found.advice) == (found.free == 0)
    assert found.workers == sum(min(6, len(models) // gpus) if gpus else 6 for models in fitting)


class HTCondorException(Exception):
    pass


def htcondor(ad: Any, answer: Any) -> Any:
    """The bindings, of a pool with this schedd that answers so: neither is at hand without a pool."""

    def ping(location, level):
        assert (location, level) == (ad, "WRITE")
        if isinstance(answer, Exception):
            raise answer
        return answer

    collector = SimpleNamespace(locate=lambda kind, name=None: ad)
    kinds = SimpleNamespace(Schedd="schedd")
    return SimpleNamespace(
        Collector=lambda: collector, DaemonType=kinds, HTCondorException=HTCondorException, ping=ping
    )


@pytest.mark.parametrize(
    ("ad", "answer", "told"),
    [
        ({"Name": "s"}, {"AuthorizationSucceeded": True, "MyRemoteUserName": "alice@x"}, None),
        ({"Name": "s"}, {"AuthorizationSucceeded": False, "MyRemoteUserName": "eve@x"}, "takes no jobs of eve@x"),
        (
            {"Name": "s"},
            {"AuthorizationSucceeded": True, "MyRemoteUserName": "unauthenticated@unmapped"},
            "takes no jobs",
        ),
        ({"Name": "s"}, {"AuthorizationSucceeded": True, "MyRemoteUserName": "root@x"}, "no jobs of root, nor"),
        ({"Name": "s"}, {"AuthorizationSucceeded": True, "MyRemoteUserName": "condor@x"}, "be another user"),
        (
            {"Name": "s"},
            HTCondorException("Failed to\nconnect."),
            r"does not answer \(Failed to connect\): see whether",
        ),
        (None, None, "this machine has no schedd: condor_status -schedd"),
    ],
)
def test_whether_the_user_may_submit(ad, answer, told):
    module = htcondor(ad, answer)
    refusal = refusal_of(module, module.Collector(), None, None)
    assert (refusal is None) == (told is None)
    if told is not None:
        assert re.search(told, refusal)


def test_a_gpu_that_is_in_nobody_s_list_is_asked_for():
    """As for a moment after a job, when its dynamic slot is gone and its GPU is not yet available again."""
    parent, _ = pslot("h1", "A8 H9", used=1)
    full = pslot("h1", "A8 H9")[0]
    queries = []

    def query(kind, constraint=None, projection=()):
        queries.append(projection)
        if len(queries) == 1:
            return [classad2.ClassAd(str(parent))]
        return [ad_of({name: str(full.lookup(name)) for name in projection})]

    module = htcondor({"Name": "s"}, {"AuthorizationSucceeded": True, "MyRemoteUserName": "alice@x"})
    module.Collector().query = query
    module.AdType, module.param = SimpleNamespace(Slot="slot"), {"ARCH": "X86_64"}
    found = ask(job(requirements='Arch =!= "x" && OpSys == "LINUX" && HasFileTransfer =!= false'), module, None, None)
    assert (found.machines, found.free, found.gpu_models) == (1, 1, {"A8": 1, "H9": 1})
    assert len(queries) == 2 and queries[1] == ["Name", "GPUs_GPU_h10"]


def test_places_are_those_of_machines_that_will_do_with_who_uses_their_gpus() -> None:
    ads = [*pslot("n1", "A8 A8", used=1), *pslot("n2", "A8 A8"), *pslot("n3", "A8", Arch='"ARM"')]
    for ad in ads:
        if ad.get("DynamicSlot"):
            ad.update({"AssignedGPUs": "GPU-n10", "RemoteOwner": "bob", "JobId": "7.0"})
    found = places_of(ads, need_of(job(requirements='Arch =!= "ARM"')))
    assert [(each.name, [gpu.uuid for gpu in each.gpus]) for each in found] == [
        ("n1", ["GPU-n10", "GPU-n11"]),
        ("n2", ["GPU-n20", "GPU-n21"]),
    ]
    assert [gpu.used_by for each in found for gpu in each.gpus] == ["bob 7.0", None, None, None]
    assert places_of(ads, need_of(job(requirements="Absent"))) == []


def test_gpus_that_will_not_do_have_no_place() -> None:
    found = places_of(pslot("n1", "A8 A9 A8", used=1), need_of(job(require_gpus="Capability < 9")))
    assert [gpu.uuid for each in found for gpu in each.gpus] == ["GPU-n10", "GPU-n12"]
