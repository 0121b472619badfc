"""What a row of a batch costs its driver, from the input to the results: calls of functions, not time."""

import itertools

from batch_helpers import write_lines

from counted_calls import counted_calls
from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job

# Only a commit that says in its message why a row has to cost more may raise this.
ROW = 90
ROWS = 4000


def test_a_row_costs_no_more_than_its_budget(folder, monkeypatch):
    """Beside what a job costs that has few."""
    few = write_lines(folder / "few.jsonl", [{"custom_id": f"id {n}", "text": f"text {n}"} for n in range(10)])
    many = write_lines(folder / "many.jsonl", [{"custom_id": f"id {n}", "text": f"text {n}"} for n in range(ROWS)])
    numbers = itertools.count()

    def run(source):
        job = load_job(
            None, input=source.name, output=f"out{next(numbers)}.jsonl", function="batch_functions:shout", workers=1
        )
        assert run_job(job).done > 0

    with counted_calls() as calls:
        start = calls.least(2, 1, lambda: run(few))
        assert calls.least(2, 1, lambda: run(many)) - start <= ROW * ROWS
