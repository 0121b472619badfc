"""What a tier may say to its batch system: HTCondor's submit keys and expressions, the options of Parsl's providers."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Iterator

from ctxflow.sites.site_model import Tier
from ctxflow.sites.site_problems import FileProblem, shown, suggestion

# What would break the provider if a site set it too; compared in lower case.
OWN_SUBMIT_KEYS = frozenset({
    "universe", "executable", "transfer_executable", "arguments", "environment", "getenv", "initialdir",
    "transfer_input_files", "encrypt_input_files", "should_transfer_files", "when_to_transfer_output",
    "transfer_output_files", "output", "error", "stream_output", "stream_error", "log", "queue", "leave_in_queue",
    "+ctxflowrun", "+ctxflowseen", "+ctxflowexcluded", "+ctxflowsubmission",
})  # fmt: skip
# The size that a worker assumes must be that of the request to HTCondor.
_SIZE_KEYS = {
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


_CLASSES = {
    "slurm": "parsl.providers.slurm.slurm:SlurmProvider",
    "pbs": "parsl.providers.pbspro.pbspro:PBSProProvider",
    "grid-engine": "parsl.providers.grid_engine.grid_engine:GridEngineProvider",
    "kubernetes": "parsl.providers.kubernetes.kube:KubernetesProvider",
}
# Options that ctxflow has besides Parsl's.
_MORE = {"slurm": ("grace",), "grid-engine": ("parallel_environment",)}
# Every worker is a job of its own, and the factory counts them.
_OURS = {
    "nodes_per_block": "leave it out, since every worker is a job of its own",
    "init_blocks": "write minimum, at the tier's level",
    "min_blocks": "write minimum, at the tier's level",
    "max_blocks": "write workers, at the tier's level",
    "parallelism": "leave it out, since the scaling policy decides",
    "launcher": "leave it out, since every worker is a job of its own",
    "regex_job_id": "leave it out",
    "pod_name": "leave it out",
}


def takes(provider: str) -> list[str] | None:
    """Return the options that a provider of Parsl takes; None where Parsl does not say.

    >>> "partition" in takes("slurm")
    True
    """
    module, _, name = _CLASSES.get(provider, "").partition(":")
    if not module:
        return None
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return [*inspect.signature(maker).parameters, *_MORE.get(provider, ())]


def option_problems(tier: Tier) -> Iterator[FileProblem]:
    """Yield what is wrong with a tier's options.

    >>> [problem.text for problem in option_problems(Tier(provider="slurm", options={"partion": "gpu"}))]
    ["options of tier gpu have no 'partion' for slurm: did you mean 'partition'?"]
    """
    if tier.provider == "kubernetes":
        yield from _kubernetes_problems(tier)
    known = takes(tier.provider)
    if known is None:
        return
    for key, value in tier.options.items():
        path = ("options", key)
        if key in _OURS:
            yield FileProblem(path, f"options of tier {tier.name} set {key!r}, which ctxflow does itself: {_OURS[key]}")
        elif key not in known:
            offered = [each for each in known if each not in _OURS]
            hint = suggestion(key, offered, f"it takes {', '.join(offered)}")
            yield FileProblem(path, f"options of tier {tier.name} have no {key!r} for {tier.provider}: {hint}")
        elif key == "walltime" and not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", str(value)):
            instead = 'write HH:MM:SS, such as walltime = "04:00:00"'
            yield FileProblem(path, f"walltime in options of tier {tier.name} cannot be {shown(value)}: {instead}")


def _kubernetes_problems(tier: Tier) -> Iterator[FileProblem]:
    if not (tier.image or tier.options.get("image")):
        text = f'tier {tier.name} has no image, which Kubernetes needs: write image = "HOST/NAME:TAG"'
        yield FileProblem(("provider",), text)
    volumes = tier.options.get("persistent_volumes")
    pairs = isinstance(volumes, (list, tuple)) and all(isinstance(v, (list, tuple)) and len(v) == 2 for v in volumes)
    if not (volumes and pairs):
        path = ("options", "persistent_volumes") if volumes else ("provider",)
        needs = f"tier {tier.name} needs a volume that pods and this machine both mount, and the run's directory on it"
        yield FileProblem(path, f'{needs}: write options = {{persistent_volumes = [["CLAIM", "/shared/runs"]]}}')


_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*")|(?P<name>'(?:\\.|[^'\\])*')|(?P<quote>["'])|(?P<open>[(\[{])|(?P<close>[)\]}])"""
    r"""|(?P<operator>=\?=|=!=|==|!=|<=|>=|&&|\|\||[=&|])|(?P<word>[A-Za-z_][\w.]*)|(?P<other>\S)|\s+""",
    re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def mistake(expression: str) -> str | None:
    """Return what to change in an expression that HTCondor would not understand as it was meant; None if nothing.

    >>> mistake('DeviceName = "NVIDIA A10"')
    '= does not compare: write =='
    >>> mistake('(Cpus > 2 && Memory > 1000')
    'a ( is not closed: add a )'
    >>> mistake('Cpus > 2 && Memory > 1000')
    """
    if not expression.strip():
        return "it is empty: write an expression, or leave the key out"
    opened: list[str] = []
    last = ""
    for token in _TOKEN.finditer(expression):
        kind, word = token.lastgroup, token[0]
        if kind is None:
            continue
        if kind == "quote":
            return f"a {word} is not closed: add a {word}"
        if kind == "open":
            opened.append(word)
        elif kind == "close":
            if not opened or _CLOSING[opened[-1]] != word:
                return f"a {word} closes nothing: leave it out"
            opened.pop()
        elif found := _wrong_token(kind, word, last, "[" in opened):
            return found
        last = word
    if opened:
        return f"a {opened[-1]} is not closed: add a {_CLOSING[opened[-1]]}"
    if last in ("&&", "||", "==", "!=", "<=", ">=", "<", ">", "=?=", "=!="):
        return f"it ends in {last}: write what comes after it, or leave it out"
    return _parsed(expression)


def _wrong_token(kind: str, word: str, last: str, in_record: bool) -> str | None:
    if word == "=" and not in_record:
        return "= does not compare: write =="
    if word in ("&", "|"):
        return f"{word} does not join conditions: write {word * 2}"
    if kind == "word" and word.lower() in ("and", "or") and last:
        return f"{word} does not join conditions: write {'&&' if word.lower() == 'and' else '||'}"
    if kind == "word" and word.lower() == "not":
        return "not is no word of ClassAds: write !"
    if kind == "name" and last in ("==", "!=", "=?=", "=!="):
        inner = word[1:-1]
        return f'{word} is the name of an attribute, since text has double quotes: write "{inner}"'
    return None


def _parsed(expression: str) -> str | None:
    try:
        classad = importlib.import_module("classad2")
    except ImportError:
        return None
    try:
        classad.ExprTree(expression)
    except Exception:  # The bindings' own, whose base classes differ from version to version.
        return "HTCondor does not understand it: see that every condition is complete"
    return None


def conditions(expression: str) -> list[str]:
    """Return the conditions that an expression joins with && at its top.

    >>> conditions('Cpus > 2 && (Memory > 9 || regexp("a && b", Machine))')
    ['Cpus > 2', '(Memory > 9 || regexp("a && b", Machine))']
    """
    found, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(expression):
        if token.lastgroup == "open":
            depth += 1
        elif token.lastgroup == "close":
            depth -= 1
        elif not depth and token[0] in ("||", "?"):
            return [expression.strip()]  # && binds closer than these.
        elif not depth and token[0] == "&&":
            found.append(expression[begin : token.start()].strip())
            begin = token.end()
    return [*found, expression[begin:].strip()]


_WORDS = {"true", "false", "undefined", "error", "is", "isnt", "my", "target"}


def attributes(expression: str) -> list[str]:
    """Return the attributes that an expression looks at, each once, without MY. and TARGET.

    >>> attributes('TARGET.Arch == "Cpus" && regexp("x", Machine) && AvailableGPUs[0].Capability > 7 && true')
    ['Arch', 'Machine', 'AvailableGPUs']
    """
    found: dict[str, str] = {}
    before = ""
    for token in _TOKEN.finditer(expression):
        word = token[0]
        if token.lastgroup == "word" and before != ".":
            name = re.sub(r"^(?:MY|TARGET)\.", "", word, flags=re.IGNORECASE).partition(".")[0]
            is_function = expression[token.end() :].lstrip().startswith("(")
            if name.lower() not in _WORDS and not is_function:
                found.setdefault(name.lower(), name)
        if token.lastgroup:
            before = word
    return list(found.values())


_PROVIDERS = ("condor", "slurm", "pbs", "grid-engine", "kubernetes", "local")
_ALIASES = {
    "htcondor": "condor", "sge": "grid-engine", "uge": "grid-engine", "age": "grid-engine",
    "gridengine": "grid-engine", "grid_engine": "grid-engine", "torque": "pbs", "pbspro": "pbs", "openpbs": "pbs",
    "k8s": "kubernetes", "kube": "kubernetes", "sbatch": "slurm", "localhost": "local", "embedded": "local",
}  # fmt: skip
# HTCondor's keys, and where other batch systems have the like.
_CONDOR_ONLY = {
    "requirements": "options, such as options = {constraint = ...} or {partition = ...}",
    "require_gpus": "options, such as options = {constraint = ...} or {partition = ...}",
    "priority": "options, such as options = {qos = ...} or {scheduler_options = ...}",
    "schedd": "options, such as options = {clusters = ...}",
    "pool": "options, such as options = {clusters = ...}",
    "submit": "options, such as options = {scheduler_options = ...}",
}


def tier_problems(tier: Tier, acquire: str = "run") -> Iterator[FileProblem]:
    """Yield all that is impossible in a tier of a site that acquires workers so; the paths begin with its keys.

    >>> [problem.text for problem in tier_problems(Tier(workers=2, minimum=5))]
    ['minimum = 5 of tier gpu is more than workers = 2: write at most 2, or more workers']
    """
    whose = f"of tier {tier.name}"
    if tier.minimum > tier.workers:
        instead = f"write at most {tier.workers}, or more workers"
        text = f"minimum = {tier.minimum} {whose} is more than workers = {tier.workers}: {instead}"
        yield FileProblem(("minimum",), text)
    for key in ("memory_gb", "disk_gb", "cache_gb", "gpu_memory_gb", "price", "boot_seconds"):
        if math.isinf(getattr(tier, key) or 0):
            yield FileProblem((key,), f"{key} {whose} cannot be infinite: write a number, such as {key} = 10")
    if (cache := tier.cache) is not None and (not os.path.isabs(cache) or re.search(r"[$\s]", cache)):
        instead = 'write a whole path without spaces and variables, such as cache = "/scratch/ctxflow"'
        yield FileProblem(("cache",), f"cache {whose} cannot be {shown(cache)}: {instead}")
    if cache is None and tier.cache_gb != Tier.model_fields["cache_gb"].default:
        instead = 'write the folder too, such as cache = "/scratch/ctxflow"'
        yield FileProblem(("cache_gb",), f"cache_gb {whose} limits no cache: {instead}")
    for name in tier.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name == "CTXFLOW_JOB":
            yield FileProblem(("env",), f"env {whose} cannot set {name!r}: write another name")
    if tier.provider not in _PROVIDERS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", tier.provider):
        yield _unknown_provider(tier)
    else:
        yield from _foreign_keys(tier)
        if tier.provider == "condor":
            yield from _expressions(tier)
            yield from _submit(tier)
        elif tier.provider != "local":
            yield from option_problems(tier)
    yield from _machine_gpus(tier, acquire)


def _unknown_provider(tier: Tier) -> FileProblem:
    meant = _ALIASES.get(tier.provider.lower())
    hint = f"did you mean {meant!r}?" if meant else suggestion(tier.provider, _PROVIDERS, "")
    choice = f"write one of {', '.join(_PROVIDERS)}, or MODULE:NAME" + (f"; {hint}" if hint else "")
    return FileProblem(("provider",), f"provider of tier {tier.name} cannot be {shown(tier.provider)}: {choice}")


def _foreign_keys(tier: Tier) -> Iterator[FileProblem]:
    """Yield keys that the tier's provider does not understand."""
    given = [key for key in (*_CONDOR_ONLY, "image", "options") if getattr(tier, key) not in (None, {})]
    for key in given:
        only, instead = "HTCondor's", _CONDOR_ONLY.get(key, "")
        if key == "options":
            if tier.provider not in ("condor", "local"):
                continue
            only, instead = "for Parsl's providers", "submit" if tier.provider == "condor" else ""
        elif tier.provider == "condor" or (key == "image" and tier.provider == "kubernetes"):
            continue
        elif key == "image":
            only = "for condor and kubernetes"
        instead = "" if tier.provider == "local" else instead
        what = f"write it in {instead}" if instead else "leave it out"
        yield FileProblem((key,), f'{key} of tier {tier.name} is {only}, and its provider is "{tier.provider}": {what}')


def _machine_gpus(tier: Tier, acquire: str) -> Iterator[FileProblem]:
    wrong = ""
    if tier.provider != "condor":
        wrong = f'is HTCondor\'s, and its provider is "{tier.provider}": leave it out'
    elif acquire == "factory":
        wrong = 'needs runs that acquire their workers themselves: write acquire = "run"'
    elif tier.machine_gpus < tier.gpus:
        wrong = f"is less than a worker has: write machine_gpus = {tier.gpus} or more"
    if tier.machine_gpus and wrong:
        yield FileProblem(("machine_gpus",), f"machine_gpus of tier {tier.name} {wrong}")


def _expressions(tier: Tier) -> Iterator[FileProblem]:
    if tier.gpus == 0 and tier.require_gpus is not None:
        text = (
            f"require_gpus of tier {tier.name} asks for GPUs, and gpus = 0: write gpus = 1, or leave require_gpus out"
        )
        yield FileProblem(("require_gpus",), text)
    for key in ("requirements", "require_gpus"):
        expression = getattr(tier, key)
        if expression is not None and (wrong := mistake(expression)):
            yield FileProblem((key,), f"{key} of tier {tier.name} is no ClassAd expression: {wrong}")
    if found := re.search(r"\b(?:CUDA|GPUs_)(\w+)", tier.require_gpus or ""):
        text = f"require_gpus of tier {tier.name} looks at one GPU, whose attributes have no prefix: write {found[1]}"
        yield FileProblem(("require_gpus",), text)


def _submit(tier: Tier) -> Iterator[FileProblem]:
    for key in tier.submit:
        lower = key.lower()
        wrong = ""
        if lower in OWN_SUBMIT_KEYS or lower.replace("my.", "+") in OWN_SUBMIT_KEYS:
            wrong = f"sets {key!r}, which ctxflow needs for itself: leave it out"
        elif lower in _SIZE_KEYS:
            wrong = f"sets {key!r}, for which a tier has a key: write {_SIZE_KEYS[lower]} = ..."
        elif not re.fullmatch(r"\+?[A-Za-z][\w.]*", key):
            wrong = f"has a key {key!r} that HTCondor cannot have: write letters, digits and _"
        if wrong:
            yield FileProblem(("submit", key), f"submit of tier {tier.name} {wrong}")
