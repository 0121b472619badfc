"""A key of artifacts depends on each fact, of the context and of the machine, and on nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from ctxflow.host.artifact_keys import context_facts, digest_of, machine_facts
from ctxflow.host.library_messages import BuildContext

FACTS = {
    "context": "c",
    "variables": {"CC": "gcc"},
    "python": "3.12",
    "packages": ["torch-2.13"],
    "gpus": [],
    "flags": "",
}


@given(st.sampled_from(sorted(FACTS)), st.text(min_size=1))
def test_a_key_depends_on_each_fact(name, value):
    assert digest_of(FACTS) == digest_of(dict(reversed(FACTS.items())))
    assert digest_of({**FACTS, name: [FACTS[name], value]}) != digest_of(FACTS)


def test_what_a_context_depends_on(tmp_path, monkeypatch):
    place = tmp_path / "site-packages"
    (place / "torch-2.13.0.dist-info").mkdir(parents=True)
    load = {"path": [str(place)], "environment": {"A": "1"}}
    before = context_facts(BuildContext("c", **load))
    assert before == context_facts(BuildContext("c", key="another", **load))
    assert before != context_facts(BuildContext("d", **load))
    assert before != context_facts(BuildContext("c", **{**load, "environment": {"A": "2"}}))
    assert before != context_facts(BuildContext("c", **load, artifacts={"a": "B"}))
    (place / "torch-2.13.0.dist-info").rename(place / "torch-2.14.0.dist-info")
    assert before != context_facts(BuildContext("c", **load))
    (place / "torch-2.14.0.dist-info").rename(place / "torch-2.13.0.dist-info")
    assert before == context_facts(BuildContext("c", **load))
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert before != context_facts(BuildContext("c", **load))
    monkeypatch.setenv("CTXFLOW_PYTHON", "/usr/bin/another")
    assert before["python"] != context_facts(BuildContext("c", **load))["python"]


def test_what_a_machine_is(tmp_path):
    def machine(flags="sse avx2", model="NVIDIA H100", driver="580.1"):
        gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01"
        gpu.mkdir(parents=True, exist_ok=True)
        (gpu / "information").write_text(f"Model: \t\t {model}\nIRQ: 3\n")
        (tmp_path / "proc/driver/nvidia/version").write_text(f"NVRM version: {driver}\nGCC\n")
        (tmp_path / "proc/cpuinfo").write_text(f"processor: 0\nflags\t\t: {flags}\n")
        return digest_of(machine_facts(str(tmp_path)))

    assert machine() == machine(flags="avx2 sse")
    assert len({machine(), machine(flags="sse"), machine(model="NVIDIA A10"), machine(driver="581")}) == 4
    assert machine_facts()["flags"]
