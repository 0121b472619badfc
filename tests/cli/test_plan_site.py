"""`ctxflow plan SITE JOB` as a person meets it."""

import json

import pytest
from typer.testing import CliRunner

from ctxflow.cli.app import app
from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.factory import tier_providers
from ctxflow.factory.provider import PoolSurvey
from ctxflow.factory.tier_providers import TierAnswer
from ctxflow.policies.agh.problem import Problem
from ctxflow.scheduler import Policies, log
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.simulation import tiers_of

SITE = """
engine = "taskvine"
[[tiers]]
name = "a10"
workers = 20
price = 0.6
require_gpus = 'DeviceName == "NVIDIA A10"'
[[tiers]]
name = "titan"
workers = 30
price = 0.2
require_gpus = 'DeviceName == "NVIDIA TITAN X (Pascal)"'
"""
VERIFY = """
hours = 10
[[queries]]
name = "verify"
items = 1500000
prompt_tokens = 400
output_tokens = 20
max_error = 0.2
errors = {small = 0.3, large = 0.1}
"""
CHAT = """[[queries]]
name = "chat"
rate = 3000
prompt_tokens = 800
output_tokens = 200
max_delay = 20
"""
MODELS = """[[models]]
name = "small"
parameters = 1.7
kv_bytes_per_token = 196608
[[models]]
name = "large"
parameters = 8
kv_bytes_per_token = 131072
"""
JOB = VERIFY + CHAT + MODELS


@pytest.fixture
def files(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def plan(folder, *options, job="job.toml"):
    return CliRunner().invoke(app, ["plan", str(folder / "site.toml"), str(folder / job), *options])


def data(folder, *options, job="job.toml"):
    run = plan(folder, "--json", *options, job=job)
    if run.exception is not None and not isinstance(run.exception, SystemExit):
        raise run.exception
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


def test_a_plan_serves_all_and_says_what_was_estimated_and_left_out(files):
    found = data(files)
    assert found["feasible"] and max(found["unserved"].values()) == pytest.approx(0, abs=1e-6)
    assert {each["tier"] for each in found["workers"] if each["model"] == "large"} == {"a10"}
    verify = {each["model"]: each["shares"].get("verify", 0.0) for each in found["workers"]}
    assert 0.3 * verify.get("small", 0.0) + 0.1 * verify["large"] <= 0.2 + 1e-6
    assert found["left_out"] == ["large on titan: (5f) 16 GB of weights, and a worker has room for 10.8 GB"]
    assert any("a roofline, not measured" in note for note in found["notes"])
    shown = plan(files)
    assert shown.exit_code == 0 and "what runs" in shown.output and "of 20" in shown.output


def test_the_saved_problem_has_the_same_answer(files):
    found = data(files, "--save", str(files / "problem.json"))
    again = CliRunner().invoke(app, ["plan", "--problem", str(files / "problem.json"), "--json"])
    assert json.loads(again.stdout)["costs"] == found["costs"]
    assert Problem.read(files / "problem.json").query_types[0].queries_per_hour == 150_000


def test_a_measured_run_takes_the_place_of_the_estimate(files, tmp_path):
    machines = pools.machines(2, "NVIDIA A10", pools.during(0.0))
    engine = SimulatedEngine(machines, GpuTimes({"NVIDIA A10": 0.5}, loading=Drawn(2.0)), None, 0, 0.0, ())
    workload = Workload([ev.ContextSpec("1", "small", gpus=1)], [ev.AppSpec("2", "ask", "1")], [(0.0, "2", 400)])
    lines = []
    policies = Policies.chosen({})
    run = Simulation(
        engine, policies, workload, tiers_of(machines), listener=lambda e, c: lines.append(log.line(e, c) + "\n")
    )
    run.run()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("".join(lines))
    job = JOB.replace("max_delay = 20", 'max_delay = 20\nmodels = ["small"]').replace("rate = 3000", "rate = 28800")
    (files / "job.toml").write_text(job)
    (files / "site.toml").write_text(SITE[: SITE.rindex("[[tiers]]")])
    found = data(files, "--measured", str(tmp_path / "run"))
    assert any("speeds measured in" in note and "small on a10" in note for note in found["notes"])
    chat = sum(each["workers"] for each in found["workers"] if "chat" in each["shares"])
    # 28,800 an hour of half a second each are four workers, at nine tenths of their time.
    assert chat >= 5


def test_live_counts_the_machines_that_there_are(files, monkeypatch):
    def ask(site):
        first, second = site.tiers
        yield TierAnswer(first, PoolSurvey(machines=2, free=0, workers=2))
        yield TierAnswer(second, None, ("the collector does not answer",))

    monkeypatch.setattr(tier_providers, "ask_tiers", ask)
    found = data(files, "--live")
    assert "tier a10: machines are there for 2 of its 20 workers now" in found["notes"]
    assert any("tier titan could not be asked" in note for note in found["notes"])
    assert sum(each["workers"] for each in found["workers"] if each["tier"] == "a10") <= 2


def test_what_cannot_be_served_says_which_limit_is_in_the_way(files):
    (files / "job.toml").write_text(JOB.replace("max_error = 0.2", "max_error = 0.01\nmax_unserved = 0"))
    run = plan(files)
    assert run.exit_code == 1
    text = " ".join(run.output.split())
    assert "verify: 90.0% of it is not served" in text
    assert "not served: verify: (5j) an error of 0.01 cannot be kept" in text


def test_errors_come_from_an_evaluation_file(files):
    entries = [
        {"model": "small", "template": "a", "error": 0.4},
        {"model": "small", "template": "b", "error": 0.1},
        {"model": "large", "template": "a", "error": None},
    ]
    (files / "evaluation.json").write_text(json.dumps({"evaluations": entries}))
    job = JOB.replace("errors = {small = 0.3, large = 0.1}", 'evaluation = "evaluation.json"')
    (files / "job.toml").write_text(job)
    found = data(files)
    assert {each["model"] for each in found["workers"] if "verify" in each["shares"]} == {"small"}
    assert any("its error is not known" in text for text in found["left_out"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_delay = 20", "max_delay = -1", "line 15: max_delay of query chat cannot be -1: write more than 0"),
        ("rate = 3000", "rat = 3000", "line 12: there is no key 'rat' of query chat: did you mean 'rate'?"),
        ("rate = 3000", "", "line 10: query chat must have a rate or items"),
        ("parameters = 8", "parameters = 8\npath = 'x'", "model large must have a path or parameters"),
        ("errors = {small", "errors = {smal", "errors of query verify names no model 'smal': did you mean 'small'?"),
        ("max_error = 0.2", "max_error = 20", "line 8: max_error of query verify cannot be 20: write a share from 0"),
        ("hours = 10", "hours = 'ten'", 'hours cannot be "ten": write a number'),
        ("errors = {small = 0.3, large = 0.1}", "evaluation = 'none.json'", "evaluation none.json of query verify"),
    ],
)
def test_a_wrong_job_file_is_told_with_line_and_key(files, old, new, message):
    (files / "job.toml").write_text(JOB.replace(old, new))
    run = plan(files)
    assert run.exit_code == 1
    assert message in str(run.exception)
    assert str(files / "job.toml") in str(run.exception)


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "'x'", "true"])
@pytest.mark.parametrize(
    "key", ["hours", "items", "prompt_tokens", "output_tokens", "max_error", "rate", "max_delay", "parameters"]
)
def test_no_number_of_a_job_is_nonsense(files, key, value):
    lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in JOB.splitlines()]
    (files / "job.toml").write_text("\n".join(lines))
    run = plan(files)
    assert run.exit_code == 1
    problems = str(run.exception).splitlines()
    assert all(f": {key}" in problem and "cannot be" in problem for problem in problems), problems


def test_a_tier_of_which_nothing_is_known_says_what_to_write(files):
    (files / "site.toml").write_text(SITE.replace("NVIDIA A10", "NVIDIA X999"))
    run = plan(files)
    assert "tier a10 has a GPU of which nothing is known (NVIDIA X999)" in str(run.exception)
    known = '[[tiers]]\nname = "a10"\ngpu_memory_gb = 24\ntflops = 125\nbandwidth_gb_s = 600\n'
    (files / "job.toml").write_text(JOB + known)
    assert data(files)["feasible"]


IDLE = """
engine = "taskvine"
[[tiers]]
name = "a10"
workers = 50
gpus = 1
price = 0.6
"""


def idle(folder, workers=50):
    """One tier of A10s, and one query type for twice as many items."""
    (folder / "site.toml").write_text(IDLE.replace("workers = 50", f"workers = {workers}"))
    tier = '[[tiers]]\nname = "a10"\ngpu = "NVIDIA A10"\n'
    (folder / "job.toml").write_text(VERIFY.replace("1500000", "3000000") + MODELS + tier)
    return folder


def test_an_idle_site_serves_what_fits_and_what_is_not_served_though_it_fits_has_a_line_and_a_status(tmp_path):
    folder = idle(tmp_path)
    best = data(folder, "--method", "exact")
    for method in ("agh", "improved"):
        found = data(folder, "--method", method)
        assert found["unserved"]["verify"] < 1e-6
        assert found["costs"]["total"] <= best["costs"]["total"] * 1.001
    poor = plan(folder, "--method", "gh")  # It takes one worker of a tier, as one keeps the delay.
    said = " ".join(poor.stdout.split())
    assert poor.exit_code == 3 and "could be served and is not: " in said and "try --method exact" in said
    found = json.loads(plan(folder, "--method", "gh", "--json").stdout)
    assert (
        found["could_be_served"]["verify"] > 0.5 and found["could_be_served_dollars"] < 0 and found["unserved_settled"]
    )


def test_what_costs_more_than_it_is_priced_at_is_said_so(tmp_path):
    job = idle(tmp_path) / "job.toml"
    job.write_text(job.read_text().replace("[[queries]]\n", "[[queries]]\nunserved = 0.01\n"))
    found = plan(tmp_path, "--method", "exact")
    said = " ".join(found.stdout.split())
    assert found.exit_code == 3 and "could be served and is not: 100% of verify, for " in said
    assert "$ more than leaving it is priced at: raise its price to have it served" in said


def test_what_does_not_fit_has_a_reason_that_is_true(tmp_path):
    found = data(idle(tmp_path, workers=3))
    assert found["unserved"]["verify"] > 0.1 and not found["could_be_served"] and found["unserved_settled"]
    assert "5c" not in {each["constraint"] for each in found["reasons"]}
    assert any("more of them" in each["text"] for each in found["reasons"] if each["constraint"] == "gpus")
