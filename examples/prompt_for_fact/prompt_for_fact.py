"""Prompt for Fact: find the best pair of model and prompt template for fact verification.

The command line and the site live here. The sweep itself is in sweep.py, what runs on workers in verifier.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import claims as data
import parsl
import report
import scores
import templates as prompts
import typer
from claims import Claim
from rich.console import Console
from sweep import Sweep, digest
from templates import Template

import models as model_names
from ctxflow import ContextExecutor
from ctxflow.installing import ctxflow_command

HERE = Path(__file__).resolve().parent
SAMPLED_SECONDS = 1.5
"""A little over the second between two samples of the run's history."""

MODELS_HELP = f"Models, with commas between: {model_names.HELP}."
TEMPLATES_HELP = (
    f"Templates, with commas between: {', '.join(template.name for template in prompts.KNOWN)}, or .json "
    'files with {"name": "text with {claim} and {evidence}"}. By default those that suit the claims.'
)

app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
messages = Console(stderr=True)


class UsageError(Exception):
    """What was asked for makes no sense; the message says what to do."""


@dataclass(frozen=True)
class Claims:
    """The claims of a sweep, by what they are for."""

    train: list[Claim]
    asked: list[Claim]

    @property
    def digest(self) -> str:
        """What tells these claims from others."""
        return digest(self.train, self.asked)


def read(path: Path, evidence: Path, out: Path, limit: int | None) -> Claims:
    """Read claims, join their evidence and deal them out to the splits.

    :raises UsageError: if there is nothing to ask.
    """
    try:
        claims, complaints = data.read_claims(path)
        for complaint in complaints:
            messages.print(complaint, style="yellow", highlight=False, soft_wrap=True)
        if any(claim.references for claim in claims):
            claims, lacking = data.join(claims, database_of(evidence, out))
            if lacking:
                messages.print(
                    f"{report.counted(lacking, 'claim')} cite evidence that {evidence.name} does not hold: "
                    "they are asked without it; give the evidence they cite with --evidence",
                    style="yellow",
                )
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    asked = [claim for split in ("dev", "test", "control") for claim in data.of_split(claims, split, limit)]
    if not any(claim.split == "test" for claim in asked):
        raise UsageError(f"{path} holds no claims to test on: give a file with more claims")
    return Claims(data.of_split(claims, "train", limit), asked)


def database_of(evidence: Path, out: Path) -> Path:
    """The evidence database: the file itself, or what is built of its text form, once for each content."""
    if evidence.suffix in (".sqlite", ".db"):
        return evidence
    database = out / "state" / f"evidence-{digest(evidence.read_text('utf-8'))}.sqlite"
    if not database.is_file():
        database.parent.mkdir(parents=True, exist_ok=True)
        data.build_database(evidence, database)
    return database


def choose_templates(names: str | None, asked: Sequence[Claim]) -> list[Template]:
    """The templates of a sweep: those named, or those that suit the claims.

    :raises UsageError: if a name is wrong, or no template is left.
    """
    has_evidence = any(claim.evidence for claim in asked)
    try:
        wished = prompts.choose(split_names(names)) if names else prompts.suited(has_evidence)
    except ValueError as error:
        raise UsageError(str(error)) from None
    chosen = [template for template in wished if has_evidence or not template.needs_evidence]
    for template in wished:
        if template not in chosen:
            messages.print(f"The claims have no evidence: the template {template.name} is left out.")
    if not chosen:
        raise UsageError("no template is left: choose one without {evidence}, such as claim-only")
    return chosen


def choose_models(names: str, out: Path) -> list[model_names.Model]:
    """The models of a sweep.

    :raises UsageError: if a name is wrong.
    """
    try:
        chosen = [model_names.parse_model(name) for name in dict.fromkeys(split_names(names))]
    except ValueError as error:
        raise UsageError(str(error)) from None
    return [model_names.with_weights(model, out / "state") for model in chosen]


def split_names(names: str) -> list[str]:
    """Take a list with commas apart."""
    return [name.strip() for name in names.split(",") if name.strip()]


@contextlib.contextmanager
def site_of(
    site: str, workers: int | None, batch_size: int, out: Path, evictions_per_minute: float
) -> Iterator[ContextExecutor]:
    """Load Parsl with a ContextExecutor on a site, and let workers be evicted if that was asked for."""
    config = ContextExecutor.config(
        site=site,
        workers=workers,
        batching={"policy": "fixed", "size": batch_size},
        run_dir=str(out / "runs"),
    )
    with parsl.load(config) as kernel, contextlib.ExitStack() as stack:
        executor = kernel.executors["ctxflow"]
        if evictions_per_minute:
            from ctxflow.testing import Evictions

            stack.enter_context(Evictions(executor, per_minute=evictions_per_minute, seed=1))
        yield executor


def state_in_words(executor: ContextExecutor) -> str:
    """What the progress display says of workers."""
    now = executor.status()
    return f"{report.counted(now.workers, 'worker')}, {report.counted(now.evictions, 'eviction')}"


def run(
    sweep: Sweep, site: str, workers: int | None, batch_size: int, evictions: float
) -> tuple[list[scores.PairResult], report.Figures, list[report.Sample]]:
    """Run the sweep on a site; returns its results, how it went, and samples of it over time."""
    with site_of(site, workers, batch_size, sweep.out, evictions) as executor:
        started = time.monotonic()
        with report.LiveProgress(messages, sweep.total_items(), lambda: state_in_words(executor)) as progress:
            results = sweep.run(progress)
        seconds = time.monotonic() - started
        now = executor.status()
        if now.items_done:
            time.sleep(SAMPLED_SECONDS)  # The last items are in a sample then.
        history = executor.history()
    figures = report.Figures(
        seconds, now.items_done, now.workers, now.evictions, now.retried_items, sweep.dead, now.loads
    )
    return results, figures, history


@app.command()
def sweep_command(
    claims: Annotated[
        Path,
        typer.Option(
            help="FEVER-style JSONL: id, claim, label, and evidence or not.",
            show_default="the shipped claims",
        ),
    ] = HERE / "claims.jsonl",
    evidence: Annotated[
        Path,
        typer.Option(help="Sentences that claims cite, as JSONL or SQLite.", show_default="the shipped sentences"),
    ] = HERE / "evidence.jsonl",
    models: Annotated[str, typer.Option(help=MODELS_HELP)] = ",".join(model_names.DEFAULT),
    templates: Annotated[
        str | None,
        typer.Option(help=TEMPLATES_HELP),
    ] = None,
    site: Annotated[str, typer.Option(help='"local" for this machine, or a site file.')] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Workers, if not as the site says.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that each model needs.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Items in a batch: what an eviction costs.")] = 32,
    evictions_per_minute: Annotated[
        float, typer.Option(min=0, help="Evict workers at random so often, to see that nothing is lost.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder of results; start again with it to go on.")] = Path(
        "prompt-for-fact"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many claims of each split at most.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Ask all claims so many times over, for a bigger sweep.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of tables.")] = False,
) -> None:
    """Find the best (model, prompt template) pair for fact verification.

    Every model is asked about every claim in every template; the answer is SUPPORTED, REFUTED or NOT ENOUGH
    INFO. The table shows the accuracy of each pair with its 95 % interval; the best pair is chosen on the dev
    split, and its figure on the test split is the one to quote.

    Stop it with Ctrl-C whenever you like, and start it again with the same command: it goes on where it was.

    Try:  python prompt_for_fact.py --limit 100

    Or:   python prompt_for_fact.py --workers 2 --evictions-per-minute 6

    Or:   python prompt_for_fact.py --models lm:HuggingFaceTB/SmolLM2-1.7B-Instruct --gpus 1

    Or:   python prompt_for_fact.py --claims fever_dev.jsonl

    Written to the folder of --out: results/ (every answer), evaluation.json (the error of each model and
    template, for planning), run.json (how the run went), throughput.png (with matplotlib).
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        read_claims = read(claims, evidence, out, limit)
        chosen = choose_templates(templates, read_claims.asked)
        sweep = Sweep(out, choose_models(models, out), chosen, read_claims.train, read_claims.asked, repeat, gpus)
        introduce(sweep)
        results, figures, history = run(sweep, site, workers, batch_size, evictions_per_minute)
    except (UsageError, OSError, ValueError) as error:
        messages.print(f"prompt_for_fact: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        messages.print(f"prompt_for_fact: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.print("\nStopped. What is answered is kept: start the same command again to go on.")
        raise typer.Exit(130) from None
    finish(sweep, read_claims, results, figures, history, as_json)
    raise typer.Exit(1 if sweep.dead else 0)


def introduce(sweep: Sweep) -> None:
    """Say what is going to be done."""
    counts = {name: len(data.of_split(sweep.asked, name)) for name in ("dev", "test", "control")}
    messages.print(
        f"{len(sweep.models)} models x {len(sweep.templates)} templates, each asked {len(sweep.asked):,} "
        f"claims ({counts['dev']:,} dev, {counts['test']:,} test, {counts['control']:,} empty as a control); "
        f"{len(sweep.train):,} claims to fit on; results in {sweep.out}",
        highlight=False,
        soft_wrap=True,
    )


def finish(
    sweep: Sweep,
    claims: Claims,
    results: Sequence[scores.PairResult],
    figures: report.Figures,
    history: Sequence[report.Sample],
    as_json: bool,
) -> None:
    """Write the files and show the results."""
    label = data.majority_label(claims.train or claims.asked)
    baseline = scores.baseline_score(claims.asked, label)
    evaluation = scores.evaluation(results, baseline, label, claims.digest)
    write_json(sweep.out / "evaluation.json", evaluation)
    write_json(sweep.out / "run.json", {**asdict(figures), "history": history})
    try:
        plot = ", throughput.png" if report.plot(history, sweep.out / "throughput.png") else ""
    except ImportError:
        plot = " (install matplotlib for a plot of throughput and workers)"
    if as_json:
        print(json.dumps({**evaluation, "run": asdict(figures)}, ensure_ascii=False))
        return
    shown = Console(width=None if sys.stdout.isatty() else 1000)  # A pipe gets all of it.
    shown.print(report.results_table(results, baseline, label))
    shown.print(report.verdict(results, baseline), highlight=False)
    shown.print(f"This run: {figures}.", highlight=False)
    if sweep.dead:
        shown.print(f"The first item without an answer: {sweep.first_failure}", highlight=False, markup=False)
    shown.print(f"In {sweep.out}: results, evaluation.json, run.json{plot}", highlight=False)
    runs = sorted((sweep.out / "runs").glob("*/ctxflow"))
    if runs:
        shown.print(f"What its workers did: {ctxflow_command()} report {runs[-1]}", highlight=False, soft_wrap=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    partial.replace(path)


if __name__ == "__main__":
    app()
