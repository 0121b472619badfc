"""The public workflow runs the commands that CONTRIBUTING names, and they exist."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
COMMANDS = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]


def test_each_target_is_in_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {target for command in COMMANDS for target in re.findall(r"\bmake ([a-z-]+)", command)}
    assert made and made <= targets


def test_shards_of_a_job_are_all_of_its_parts():
    for job in WORKFLOW["jobs"].values():
        shards = job.get("strategy", {}).get("matrix", {}).get("shard", [])
        assert shards == [f"{number}/{len(shards)}" for number in range(1, len(shards) + 1)]


def test_local_tests_run_on_each_supported_python():
    setup = (ROOT / "setup.cfg").read_text()
    supported = re.findall(r"Python :: (3\.\d+)$", setup, re.MULTILINE)
    assert WORKFLOW["jobs"]["local"]["strategy"]["matrix"]["python"] == supported
