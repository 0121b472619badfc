"""Mistakes that people make in site files: each is told with its line, the key, and what to write."""

from __future__ import annotations

import pytest

from ctxflow.sites import Site, SiteError, load_site
from ctxflow.sites.site_model import Tier

HEAD = 'engine = "taskvine"\n[[tiers]]\n'  # Two lines: a tier's first key stands on line 3.
SLURM = HEAD + 'provider = "slurm"\n'

# Each: the file, the line, the key that the message names, and what it says to write.
TOML = {
    "text without quotes": ("name = lab", 1, "name", 'write name = "lab"'),
    "quotes in quotes": (HEAD + 'requirements = "Arch == "X86_64""', 3, "requirements", "= 'Arch == \"X86_64\"'"),
    "Python's True": ("ssl = True", 1, "ssl", "write ssl = true"),
    "== for =": ("workers == 2", 1, "workers", "write workers = 2"),
    "a colon": ("workers: 3", 1, "workers", "write workers = 3"),
    "a key twice": ("workers = 1\n\nworkers = 2", 3, "workers", "leave one out"),
    "an open string": ('slots = 2\nname = "lab', 2, "name", 'end it with "'),
    "typographic quotes": ("name = “lab”", 1, "quotes", "write plain ones"),
    "a backslash": (HEAD + r'requirements = "regexp(\"\d\", Name)"', 3, "requirements", "single quotes"),
    "no value": ("slots =", 1, "slots", "leave the line out"),
    "a unit": (HEAD + "memory_gb = 10 GB", 3, "memory_gb", "write memory_gb = 10"),
    "percent": ("start_when = 95%", 1, "start_when", "write start_when = 0.95"),
    "a decimal comma": (HEAD + "price = 0,5", 3, "price", "write price = 0.5"),
    "null": ("scratch = null", 1, "scratch", "leave scratch out"),
    "an open header": ('name = "lab"\n[[tiers]\nname = "a"', 2, "header", "write [[tiers]]"),
    "one header twice": ('[tiers]\nname = "a"\n[tiers]\nname = "b"', 3, "tier", "write [[tiers]] before each"),
    "an open list": ("port = [9000, 9100", 1, "port", "end it with ]"),
    "a key with a plus": (HEAD + 'submit = {+Project = "x"}', 3, "+Project", 'write "+Project" = '),
    "colons in a table": (HEAD + 'submit = {rank: "Cpus"}', 3, "submit", "write submit = {key = value, key = value}"),
    "JSON": ('{"name": "lab"}', 1, "line", "KEY = VALUE"),
    "a hidden character": ('name = "a\x01b"', 1, "name", "take it out"),
}
KEYS = {
    "a typing error": ("name = 'lab'\nworker = 2", 2, "worker", "did you mean 'workers'?"),
    "no such key": ("zebra = 2", 1, "zebra", "a site's keys are name, engine, workers, "),
    "a tier's key at the site's level": ("gpus = 2", 1, "gpus", "put it under a header [[tiers]]"),
    "a site's key in a tier": (HEAD + 'scaling = "fixed"', 3, "scaling", "put it above the first [[tiers]]"),
    "one policy for all": (
        'policy = "fixed"',
        1,
        "policy",
        "routing, batching, placement, preemption, scaling, health, sessions",
    ),
    "[tiers] for [[tiers]]": ('engine = "taskvine"\n[tiers]\nname = "a10"', 2, "tiers", "write [[tiers]] in place of"),
    "a table for each tier": ("[tiers.a10]\ngpus = 1", 1, "tiers", 'write [[tiers]] and under it name = "a10"'),
    "tiers by name alone": ('tiers = ["a10"]', 1, "tiers", "write [[tiers]] on a line of its own"),
    "tiers as a number": ("tiers = 3", 1, "tiers", "write [[tiers]] on a line of its own"),
    "gpu for gpus": (HEAD + "gpu = 1", 3, "gpu", "did you mean 'gpus'?"),
    "HTCondor's word": (HEAD + "request_memory = 4096", 3, "request_memory", "did you mean 'memory_gb'?"),
    "a tier's environment": (HEAD + "environment = {A = '1'}", 3, "environment", "did you mean 'env'?"),
    "a tier's typing error": (HEAD + "requirement = 'x'", 3, "requirement", "did you mean 'requirements'?"),
    "a submit key": (HEAD + 'accounting_group = "hep"', 3, "accounting_group", 'submit = {accounting_group = "hep"}'),
    "an attribute": (HEAD + '"+Project" = "x"', 3, "+Project", 'write submit = {"+Project" = "x"}'),
    "Slurm's option": (SLURM + 'partition = "gpu"', 4, "partition", 'write options = {partition = "gpu"}'),
    "no such key of a tier": (HEAD + "zebra = 1", 3, "zebra", "a tier's keys are name, provider, "),
}
VALUES = {
    "none at all": ("workers = 0", 1, "workers", "write 1 or more"),
    "a negative number": (HEAD + "cores = -2", 3, "cores", "write 1 or more"),
    "no memory": (HEAD + "memory_gb = 0", 3, "memory_gb", "write more than 0"),
    "a unit in quotes": (
        HEAD + 'memory_gb = "10 GB"', 3, 'memory_gb of tier 1 cannot be "10 GB"', "such as memory_gb = 10"),
    "another unit": (HEAD + 'name = "a10"\nmemory_gb = "512 MB"', 4, "memory_gb of tier a10", "memory_gb = 0.512"),
    "a word for a number": ('workers = "many"', 1, "workers", "write a whole number without quotes"),
    "a broken number": ("slots = 1.5", 1, "slots", "such as slots = 2"),
    "a list for a number": (HEAD + "gpus = [1, 2]", 3, "gpus", "such as gpus = 1"),
    "an unknown engine": ('engine = "taskvin"', 1, "engine", "or \"taskvine\"; did you mean 'taskvine'?"),
    "a number for text": ("scratch = 3", 1, "scratch", 'such as scratch = "3"'),
    "a space in a name": (HEAD + 'name = "RTX 6000"', 3, "name", 'such as name = "RTX-6000"'),
    "several requirements": (HEAD + "requirements = ['a > 1', 'b']", 3, "requirements", '= "(a > 1) && (b)"'),
    "a share in percent": ("start_when = 95", 1, "start_when", "such as start_when = 0.95"),
    "text for a switch": ('ssl = "always"', 1, "ssl", "write true or false"),
    "text for a table": (HEAD + 'submit = "rank = Cpus"', 3, "submit", "write a table, submit = {KEY = VALUE}"),
    "a number for a variable": (HEAD + "env = {N = 4}", 3, "N in env", 'write N = "4"'),
    "text for a port": ('port = "any"', 1, "port", "such as port = 9123"),
    "cache with a variable": (HEAD + 'cache = "$TMPDIR/ctxflow"', 3, "cache", 'such as cache = "/scratch/ctxflow"'),
    "cache somewhere": (HEAD + 'cache = "ctxflow"', 3, "cache", "write a whole path without spaces and variables"),
    "limit of no cache": (HEAD + "cache_gb = 5", 3, "cache_gb", "write the folder too"),
    "infinite": (HEAD + "disk_gb = inf", 3, "disk_gb", "such as disk_gb = 10"),
    "a variable without a name": (HEAD + 'env = {"A=B" = "1"}', 3, "env", "write another name"),
    "a policy's typing error": ('routing = "least-load"', 1, "routing", "did you mean 'least-loaded'?"),
    "an unknown policy": ('scaling = "turbo"', 1, "scaling policy 'turbo'", "choose one of "),
    "a policy without a name": ("[batching]\nsize = 3", 1, "batching", 'write {policy = "...", ...}'),
    "a policy's option": ('placement = {policy = "agh", period = -5}', 1, "period", "give more than 0, not -5"),
    "an option in quotes": ('placement = {policy = "agh", clear = "x"}', 1, "clear", "give more than 0, not 'x'"),
    "an option that there is not": ('placement = {policy = "agh", often = 5}', 1, "often", "it takes period, clear"),
    "a number for a policy": ("routing = 5", 1, "routing", "write a name (context-affinity"),
}  # fmt: skip
TOGETHER = {
    "minimum over workers": (HEAD + "workers = 2\nminimum = 5", 4, "minimum", "write at most 2"),
    "endless GPU memory": (HEAD + "gpu_memory_gb = inf", 3, "gpu_memory_gb", "write a number"),
    "machines of one tier": (HEAD + 'machines = "a100"', 3, "machines", "or leave it out"),
    "a name twice": (HEAD + 'name = "a"\n[[tiers]]\nname = "a"', 5, "name", 'such as name = "a-2"'),
    "an unknown provider": (HEAD + 'provider = "htcondor"', 3, "provider", "did you mean 'condor'?"),
    "a mistyped provider": (HEAD + 'provider = "grid-engin"', 3, "provider", "did you mean 'grid-engine'?"),
    "requirements for Slurm": (SLURM + "requirements = 'Cpus > 2'", 4, "requirements", "write it in options"),
    "submit for Slurm": (SLURM + "submit = {rank = 'Cpus'}", 4, "submit", "{scheduler_options = ...}"),
    "options for HTCondor": (HEAD + "options = {partition = 'gpu'}", 3, "options", "write it in submit"),
    "an image for Slurm": (SLURM + "image = 'debian'", 4, "image", "leave it out"),
    "requirements for local": (HEAD + "provider = 'local'\nrequirements = 'a'", 4, "requirements", "leave it out"),
    "Parsl's option mistyped": (SLURM + "options = {partion = 'gpu'}", 4, "partion", "did you mean 'partition'?"),
    "an option in a table": (
        SLURM + "[tiers.options]\npartition = 'gpu'\nwall = '1'", 6, "wall", "did you mean 'walltime'?"),
    "an option of ours": (SLURM + "options = {max_blocks = 3}", 4, "max_blocks", "write workers"),
    "a walltime in seconds": (SLURM + "options = {walltime = 3600}", 4, "walltime", 'walltime = "04:00:00"'),
    "Kubernetes without image": (
        HEAD + "provider = 'kubernetes'\noptions = {persistent_volumes = [['c', '/p']]}", 3, "image", "write image ="),
    "Kubernetes without volume": (
        HEAD + "provider = 'kubernetes'\nimage = 'x'", 3, "volume", "options = {persistent_volumes = "),
    "a volume without path": (
        HEAD + "provider = 'kubernetes'\nimage = 'x'\noptions = {persistent_volumes = ['c']}", 5, "volume", "[["),
    "a walltime without seconds": (SLURM + "options = {walltime = '4:00'}", 4, "walltime", 'walltime = "04:00:00"'),
    "ctxflow's submit key": (HEAD + "submit = {Log = '/tmp/log'}", 3, "Log", "leave it out"),
    "a size in submit": (HEAD + "submit = {request_memory = 9000}", 3, "request_memory", "write memory_gb ="),
    "an impossible submit key": (HEAD + "submit = {'my key' = 1}", 3, "my key", "write letters"),
    "GPUs wanted and not": (HEAD + "gpus = 0\nrequire_gpus = 'Capability > 8'", 4, "require_gpus", "write gpus = 1"),
    "places without HTCondor": (SLURM + "machine_gpus = 8", 4, "machine_gpus", "leave it out"),
    "places through a factory": ('acquire = "factory"\n' + HEAD + "machine_gpus = 8", 4, "machine_gpus", "= \"run\""),
    "a machine less than a worker": (HEAD + "gpus = 4\nmachine_gpus = 2", 4, "machine_gpus", "= 4 or more"),
    "an open parenthesis": (HEAD + "requirements = '((Cpus > 2) && x'", 3, "requirements", "add a )"),
    "a parenthesis too many": (HEAD + "requirements = 'Cpus > 2)'", 3, "requirements", "leave it out"),
    "an open quote": (HEAD + "requirements = 'Arch == \"X86_64'", 3, "requirements", 'add a "'),
    "= for ==": (HEAD + "requirements = 'Arch = \"X86_64\"'", 3, "requirements", "write =="),
    "single quotes in a ClassAd": (HEAD + "requirements = \"Arch == 'X86_64'\"", 3, "requirements", 'write "X86_64"'),
    "and for &&": (HEAD + "requirements = 'Cpus > 2 and HasX'", 3, "requirements", "write &&"),
    "one &": (HEAD + "require_gpus = 'Capability > 2 & Capability < 9'", 3, "require_gpus", "write &&"),
    "a loose end": (HEAD + "requirements = 'Cpus > 2 &&'", 3, "requirements", "leave it out"),
    "no expression": (HEAD + "requirements = ''", 3, "requirements", "leave the key out"),
    "a slot's attribute of a GPU": (
        HEAD + "require_gpus = 'GPUs_DeviceName == \"A\"'", 3, "require_gpus", "write DeviceName"),
    "timeouts the wrong way": ("keepalive_interval = 9\nkeepalive_timeout = 6", 2, "keepalive_timeout", "= 27"),
    "ports the wrong way": ("port = [9100, 9000]", 1, "port", "write port = [9000, 9100]"),
    "an impossible port": ("port = 99999", 1, "port", "a number from 1024 to 65535"),
    "a port in the address": ('address = "submit1:9123"', 1, "address", 'write address = "submit1"'),
    "tiers on this machine": ("[[tiers]]\nname = 'a'", 1, "tiers", 'write engine = "taskvine"'),
    "embedded with tiers": ('engine = "embedded"\n[[tiers]]', 1, "engine", "leave the tiers out"),
    "no tiers": ('name = "x"\nengine = "taskvine"', 2, "tier", "write [[tiers]]"),
    "a home directory": ('python_environment = "~/env"', 1, "python_environment", 'write "/'),
    "a path that means nothing": ('python_environment = "envs/a"', 1, "python_environment", "write its whole path"),
    "Python itself": (
        'python_environment = "/opt/ctxflow/bin/python3"',
        1,
        "python_environment",
        'write "/opt/ctxflow"',
    ),
    "a missing archive": ('python_environment = "/nowhere/env.tar.gz"', 1, "python_environment", "ctxflow env pack"),
}  # fmt: skip
MISTAKES = TOML | KEYS | VALUES | TOGETHER


@pytest.mark.parametrize(("text", "line", "key", "advice"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told_with_its_line_its_key_and_what_to_write(tmp_path, text, line, key, advice):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(SiteError) as caught:
        load_site(path)
    [told] = caught.value.lines
    assert told.startswith(f"{path}, line {line}: "), told
    assert key in told and advice in told, told


def test_all_mistakes_are_told_in_the_order_of_their_lines(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text("slots = 0\nworker = 1\n" + HEAD + 'cores = 0\nname = "x y"\n')
    with pytest.raises(SiteError) as caught:
        load_site(path)
    places = [told.removeprefix(f"{path}, line ").partition(":")[0] for told in caught.value.lines]
    assert places == ["1", "2", "5", "6"] and str(caught.value).count("\n") == 3


def test_a_folder_without_python_is_no_environment(tmp_path):
    with pytest.raises(SiteError, match=r"has no bin/python: write the folder of a virtual"):
        load_site(Site(python_environment=str(tmp_path)))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert load_site(Site(python_environment=str(tmp_path))).python_environment == str(tmp_path)
    with pytest.raises(SiteError, match=r"is no packed environment: write a folder, or a \.tar\.gz"):
        load_site(Site(python_environment=__file__))


def test_wrong_places_say_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r'there is no site \'lokal\': give "local" or the path of a site file'):
        load_site("lokal")
    with pytest.raises(ValueError, match="is a folder: give the path of a site file"):
        load_site(tmp_path)
    (tmp_path / "lab.toml").touch()
    with pytest.raises(ValueError, match=r"is a folder: give one of the files in it, such as .*lab\.toml"):
        load_site(tmp_path)
    (tmp_path / "lab.toml").write_bytes(b'name = "lab"\n# \xff\n')
    with pytest.raises(ValueError, match=r"lab\.toml, line 2: it is not TOML: .* save the file as UTF-8"):
        load_site(tmp_path / "lab.toml")


def test_what_the_program_says_has_no_line(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text("workers = 3\n")
    with pytest.raises(SiteError) as caught:
        load_site(path, workers=0)
    assert caught.value.lines == (f"{path}: workers cannot be 0: write 1 or more",)
    with pytest.raises(SiteError, match="minimum = 5 of tier a is more than workers = 2"):
        load_site(Site(engine="taskvine", tiers=(Tier(name="a", workers=2, minimum=5),)))


@pytest.mark.parametrize(
    "expression",
    [
        'Arch == "X86_64" && (Memory >= 1000 || regexp("a = (b", Machine))',
        "Capability >= 8.0 && DriverVersion =?= 12.4",
        "[a = 1; b = 2].a == 1",
        'stringListMember("x", "x,y") =!= false',
        "'odd name' > 3 && !HasX",
        "TARGET.Cpus > MY.RequestCpus ? true : Memory > 9",
    ],
)
def test_expressions_that_are_right_are_left_alone(expression):
    assert load_site(Site(engine="taskvine", tiers=(Tier(requirements=expression),)))
