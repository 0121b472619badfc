"""What ctxflow uses of Parsl's that Parsl does not promise to keep: each is there, and is what it was.

Where one of these fails with a newer Parsl, its sentence says what of ctxflow has to be looked at.
"""

import inspect

import parsl
import pytest
from parsl.app.errors import wrap_error
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.executors.threads import ThreadPoolExecutor
from parsl.launchers import SimpleLauncher
from parsl.providers import GridEngineProvider, KubernetesProvider, LocalProvider, PBSProProvider, SlurmProvider

from ctxflow.executors.bare import parsl_kernel
from ctxflow.pickling import ReturnsErrors, without_parsl

CLUSTERS = [SlurmProvider, PBSProProvider, GridEngineProvider]


def test_the_kernel_that_is_loaded_is_found():
    sentence = "DataFlowKernelLoader._dfk is not the loaded kernel: executors/bare.py (parsl_kernel) must find another"
    assert getattr(DataFlowKernelLoader, "_dfk", "missing") is None, sentence
    config = Config(executors=[ThreadPoolExecutor()], initialize_logging=False, strategy="none", exit_mode="wait")
    with parsl.load(config) as kernel:
        assert DataFlowKernelLoader._dfk is kernel is parsl_kernel(), sentence
        assert kernel.cleanup_called is False, "DataFlowKernel.cleanup_called: see executors/parsl_wait.py"
        assert kernel.config.exit_mode == "wait", "config.exit_mode: see executors/executor.py (forked)"
        DataFlowKernelLoader._dfk = None
        assert parsl_kernel() is None, sentence
        DataFlowKernelLoader._dfk = kernel
    assert parsl_kernel() is None, sentence


def test_a_wait_for_all_tasks_is_seen_on_the_stack():
    sentence = "DataFlowKernel no longer waits there: executors/parsl_wait.py must look for another function"
    assert "wait_for_current_tasks" in DataFlowKernel.__exit__.__code__.co_names, sentence
    assert list(inspect.signature(DataFlowKernel.wait_for_current_tasks).parameters) == ["self"], sentence


@pytest.mark.parametrize("provider", CLUSTERS, ids=lambda each: each.__name__)
def test_providers_speak_to_batch_systems_by_what_can_be_replaced(provider):
    sentence = f"{provider.__name__} has another way than execute_wait: factory/parsl_systems.py (ParslIntercept) fails"
    told = getattr(provider, "execute_wait", lambda: None)
    assert list(inspect.signature(told).parameters) == ["self", "cmd", "timeout"], sentence
    for method in ("submit", "_status", "cancel"):
        assert "execute_wait" in getattr(provider, method).__code__.co_names, f"{sentence} ({method})"


def test_providers_write_where_they_are_told():
    provider = SlurmProvider(launcher=SimpleLauncher(), walltime="00:10:00")
    for name in ("script_dir", "nodes_per_block", "launcher", "label"):
        assert hasattr(provider, name), f"SlurmProvider has no {name}, which factory/parsl_provider.py sets or reads"
    assert list(inspect.signature(provider.submit).parameters)[:2] == ["command", "tasks_per_node"]
    assert LocalProvider().label == "local"


def test_pods_are_created_by_a_client_that_can_be_wrapped():
    sentence = "KubernetesProvider creates pods in another way: factory/parsl_systems.py (OnePod) cannot change them"
    assert "kube_client" in KubernetesProvider.__init__.__code__.co_names, sentence
    create = getattr(KubernetesProvider, "_create_pod", lambda: None).__code__
    assert {"kube_client", "create_namespaced_pod"} <= set(create.co_names), sentence
    assert ("namespace", "body") in create.co_consts, sentence


def test_an_apps_function_can_be_had_without_the_wrapper():
    def plain():
        return 1

    found = without_parsl(wrap_error(plain))
    assert isinstance(found, ReturnsErrors) and found.func is plain, (
        "Parsl wraps apps in another way: parsl_apps.py leaves its wrapper, and workers import Parsl for each app"
    )
