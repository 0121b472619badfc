"""`ctxflow simulate` as a person meets it."""

import json

import pytest
from in_process import ctxflow

SITE = 'engine = "taskvine"\n[[tiers]]\nname = "a10"\nworkers = 4\n[[tiers]]\nname = "titan"\nworkers = 2\n'
WORKLOAD = """
[[apps]]
items = 2000
item_seconds = {a10 = 0.2, titan = 0.4}
call_seconds = 0.5
[[contexts]]
load_seconds = 15
"""


def command(*arguments, verb="simulate", **options):
    return ctxflow(verb, *arguments, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "work.toml").write_text(WORKLOAD)
    return tmp_path


def test_one_case_then_its_report_then_its_what_ifs(folder):
    done = command("site.toml", "work.toml", "--set", "workload.evictions.per_hour=60", "--output", "sim", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("Makespan ", "of what nobody beats", "2,000 of 2,000 done", "evicted", "Lost ", " loads in "):
        assert word in done.stdout
    pytest.importorskip("matplotlib")
    assert (folder / "sim" / "workers_and_items.png").stat().st_size > 5000
    report = command("sim", "--no-pictures", verb="report", cwd=folder)
    assert "2,000 of 2,000 done" in report.stdout
    asked = command("sim", "--set", "workers=2x", "--json", cwd=folder)
    data = json.loads(asked.stdout)
    assert [case["case"] for case in data["cases"]] == ["as it was", "workers=2x"]
    as_it_was, more = (case["median"]["seconds"] for case in data["cases"])
    assert as_it_was == pytest.approx(data["recorded"]["seconds"], rel=0.1)
    assert more < 0.75 * as_it_was
    assert data["recorded"]["done"] == 2000 and data["doubts"] == []
    table = command("sim", "--sweep", "batching=opportunistic,fixed", cwd=folder).stdout.splitlines()
    assert [line.split("  ")[0] for line in table[3:]] == [
        "recorded", "as it was", "batching=opportunistic", "batching=fixed",
    ]  # fmt: skip


def test_windows_of_items_in_flight_are_compared(folder):
    app = "items = 600\ntokens = 100\ntokens_per_second = 2000\nknee = 8\n"
    (folder / "flying.toml").write_text(f"[[apps]]\n{app}[[contexts]]\nload_seconds = 2\n")
    done = command("site.toml", "flying.toml", "--windows", "2,32", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:5] == ["makespan", "ratio", "items/s", "tokens/s", "lost"]
    assert "window=2}" in rows[0] and "window=32}" in rows[2]
    slow, fast = (float(row.split()[4 if "ratio" in head else 3].replace(",", "")) for row in (rows[1], rows[3]))
    assert fast > 2 * slow
    wrong = command("site.toml", "flying.toml", "--windows", "2,none", cwd=folder)
    assert wrong.returncode == 2 and "give numbers of items in flight" in wrong.stderr


def test_a_sweep_with_several_seeds_is_a_table(folder):
    done = command("site.toml", "work.toml", "--sweep", "tiers.a10.workers=4,8", "--runs", "2", cwd=folder)
    assert done.returncode == 0
    head, first, second = done.stdout.splitlines()
    assert head.split() == ["makespan", "spread", "ratio", "items/s", "bound", "loads"]
    assert first.startswith("tiers.a10.workers=4 ") and second.startswith("tiers.a10.workers=8 ")
    assert max(map(len, (head, first, second))) <= 80
    assert float(second.split()[5]) < 0.9 < float(first.split()[5]) == 1


def test_json_is_the_same_for_a_seed(folder):
    one, two, other = (
        json.loads(command("site.toml", "work.toml", "--json", "--seed", seed, cwd=folder).stdout) for seed in (3, 3, 4)
    )
    assert one == two != other
    [case] = one["cases"]
    assert case["median"]["efficiency"] == case["runs"][0]["efficiency"] > 0.5
    assert case["spread"]["seconds"] == 0


def test_what_does_not_end_has_an_exit_status(folder):
    never = ("--set", "workload.evictions.drain_from=10", "--until", "1")
    done = command("site.toml", "work.toml", *never, "--set", "workload.evictions.drain_every=1", cwd=folder)
    assert done.returncode == 1
    assert "items left after 3,600 s: see --until" in done.stdout


def test_errors_are_one_sentence(folder):
    (folder / "wrong.toml").write_text("[[apps]]\nitmes = 3\n")
    wrong = command("site.toml", "wrong.toml", cwd=folder)
    assert wrong.stderr == "ctxflow: wrong.toml, line 2: an app has no key 'itmes' (app 1): did you mean 'items'?\n"
    key = command("site.toml", "work.toml", "--set", "batchng=fixed", cwd=folder)
    asked = "ctxflow: as changed by batchng=fixed: site.toml: a site has no key 'batchng': did you mean 'batching'?\n"
    assert key.stderr == asked
    count = command("site.toml", "work.toml", "--set", "workload.apps.0.items=-3", cwd=folder)
    assert count.stderr.startswith("ctxflow: as changed by workload.apps.0.items=-3: work.toml")
    (folder / "empty").mkdir()
    none = command("empty", cwd=folder)
    assert "holds no run" in none.stderr
    for done in (wrong, key, count, none):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1 if done is wrong else 2, "", 1)
    half = command("site.toml", cwd=folder)
    assert half.returncode == 2 and "give a workload file too" in half.stderr


def test_help_teaches():
    done = command("--help")
    for word in ("[[apps]]", "--sweep", "2x", "workload.evictions.per_hour", "fluid", "--until"):
        assert word in done.stdout
