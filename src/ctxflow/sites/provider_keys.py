"""HTCondor's submit keys as a site's author meets them: which are ctxflow's own, and which a tier has keys for.

What does not live here: the submit description (factory/condor_description.py).
"""

from __future__ import annotations

import importlib
import inspect
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
_VOLUMES = 'persistent_volumes = [["CLAIM", "/shared/runs"]]'


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
            yield FileProblem(
                path,
                f"walltime in options of tier {tier.name} cannot be {shown(value)}: write hours, minutes and seconds, "
                'such as walltime = "04:00:00"',
            )


def _kubernetes_problems(tier: Tier) -> Iterator[FileProblem]:
    if not (tier.image or tier.options.get("image")):
        yield FileProblem(("provider",), f'tier {tier.name} needs a container image: write image = "HOST/NAME:TAG"')
    volumes = tier.options.get("persistent_volumes")
    pairs = isinstance(volumes, (list, tuple)) and all(isinstance(v, (list, tuple)) and len(v) == 2 for v in volumes)
    if not (volumes and pairs):
        yield FileProblem(
            ("options", "persistent_volumes") if volumes else ("provider",),
            f"tier {tier.name} needs a volume that pods and this machine both mount, and the run's directory on it: "
            f"write options = {{{_VOLUMES}}}",
        )


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
