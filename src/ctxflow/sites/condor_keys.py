"""HTCondor's submit keys as a site's author meets them: which are ctxflow's own, and which a tier has keys for.

What does not live here: the submit description (factory/condor_jobs.py).
"""

from __future__ import annotations

# What would break the provider if a site set it too; compared in lower case.
OWN_SUBMIT_KEYS = frozenset({
    "universe", "executable", "transfer_executable", "arguments", "environment", "getenv", "initialdir",
    "transfer_input_files", "encrypt_input_files", "should_transfer_files", "when_to_transfer_output",
    "transfer_output_files", "output", "error", "stream_output", "stream_error", "log", "queue", "leave_in_queue",
    "+ctxflowrun", "+ctxflowseen", "+ctxflowexcluded", "+ctxflowsubmission",
})  # fmt: skip
# What a worker is told of its size must be what HTCondor is asked for.
TIER_KEYS = {
    "request_cpus": "cores", "request_memory": "memory_gb", "request_disk": "disk_gb", "request_gpus": "gpus",
}  # fmt: skip
# What people set in `submit`, and look for at the tier's level.
SUBMIT_EXAMPLES = frozenset({
    "accounting_group", "accounting_group_user", "concurrency_limits", "cuda_version", "gpus_maximum_capability",
    "gpus_minimum_capability", "gpus_minimum_memory", "gpus_minimum_runtime", "hold", "job_lease_duration",
    "job_max_vacate_time", "max_retries", "nice_user", "notify_user", "periodic_hold", "periodic_release",
    "periodic_remove", "projectname", "rank", "undesired_sites", "use_oauth_services", "want_graceful_removal",
    "x509userproxy",
})  # fmt: skip
