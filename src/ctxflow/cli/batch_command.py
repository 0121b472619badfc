"""`ctxflow batch`: a prompts file in, a results file out, killed and restarted at will.

Its options, and their reference, are made of the keys of a job (`ctxflow.batch.job.Job`):
``python -m ctxflow.cli.batch_command > docs/batch-options.md`` writes the reference.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ctxflow.batch.job import Job, load_job, options
from ctxflow.batch.job_option import RUN, WHAT, Option
from ctxflow.cli.screen import metrics_place
from ctxflow.errors import UsageError
from ctxflow.ownership import lead_nowhere
from ctxflow.terminal import timed

if TYPE_CHECKING:
    from ctxflow.batch.driver import Outcome


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each key of a job, in front of its own; it gets those as keyword arguments.

    :param command: a function with `**given`, which gets the keys that a person wrote something for.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    made = [_parameter(name, said) for name, said in options().items()]
    parameters = [*made, *(each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY) for each in own)]

    def called(**given: Any) -> None:
        command(
            **{each.name: given.pop(each.name) for each in own},
            **{
                name: _pairs(name, value) if typing.get_origin(_plain(name)) is dict else value
                for name, value in given.items()
                if value is not None
            },
        )

    called.__doc__, called.__name__ = command.__doc__, command.__name__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _parameter(name: str, said: Option) -> inspect.Parameter:
    """Return the option, or the argument, of a key as typer reads it."""
    about: Any = typer.Argument(metavar=said.metavar, help=said.help)
    if said.panel:
        about = _option(said.help, said.panel, *flags(name, said), metavar=said.metavar)
    kind = Annotated[_written(name) | None, about]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def flags(name: str, said: Option) -> tuple[str, ...]:
    """Return a key's flags."""
    return said.flags or (f"--{name.replace('_', '-')}",)


def _plain(name: str) -> Any:
    """Return the type of a key, without what it may be beside: None."""
    kind = Job.model_fields[name].annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


def _written(name: str) -> Any:
    """Return the type that typer takes for a key: the job's own check says what is wrong with a value."""
    kind = _plain(name)
    origin = typing.get_origin(kind)
    if origin in (tuple, dict):
        return list[str]
    return kind if origin is Literal or kind in (int, float) else str


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def _pairs(key: str, given: Sequence[str]) -> dict[str, Any]:
    """Return the table of a key that is given as NAME=VALUE, once for each."""
    said = options()[key]
    texts = typing.get_args(_plain(key))[1] is str
    return named_values(flags(key, said)[0], str(said.metavar), given, names=key != "constants", texts=texts)


def named_values(
    flag: str, metavar: str, given: Sequence[str], *, names: bool = False, texts: bool = False
) -> dict[str, Any]:
    """Return what NAME=VALUE says, where a value is JSON if it can be, else text.

    :param flag, metavar: for messages.
    :param names: whether a name may be one that Python does not have, such as "max-model-len".
    :param texts: whether values are text in any case.

    >>> named_values("--set", "NAME=VALUE", ["top=3", "name=Paris"])
    {'top': 3, 'name': 'Paris'}
    """
    found: dict[str, Any] = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not (name.isidentifier() or (names and _NAME.fullmatch(name))):
            raise UsageError(f"{flag} {each!r} is not to be understood: write {metavar}")
        if name in found:
            raise UsageError(f"{flag} names {name} twice: give each once")
        if texts:
            found[name] = value
            continue
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


@with_job_options
def batch(
    job: Annotated[
        Path | None, _option("A TOML file with any of these options; flags override it.", WHAT, "--job", metavar="FILE")
    ] = None,
    retry_errors: Annotated[bool, _option("Retry the rows that failed.", RUN, "--retry-errors")] = False,
    fresh: Annotated[bool, _option("Start over, and overwrite existing results.", RUN, "--fresh")] = False,
    dry_run: Annotated[
        bool,
        _option("Check everything, show the first prompts and the planned work, and start nothing.", RUN, "--dry-run"),
    ] = False,
    quiet: Annotated[bool, _option("Print only errors.", RUN, "-q", "--quiet")] = False,
    metrics: Annotated[
        str | None,
        _option("Serve Prometheus metrics at this address; 127.0.0.1 by default.", RUN, metavar="[ADDRESS:]PORT"),
    ] = None,
    as_json: Annotated[bool, _option("Print the final figures as JSON.", RUN, "--json")] = False,
    detach: Annotated[
        bool, _option("Submit the driver itself to HTCondor, and return: see ctxflow jobs.", RUN, "--detach")
    ] = False,
    **given: Any,
) -> None:
    """Run a model, or your own function, over every row of a file.

    \b
    ctxflow batch requests.jsonl -o results.jsonl -m Qwen/Qwen3-0.6B
    ctxflow batch claims.csv -o out.parquet -m MODEL -t chat \\
      --template 'True or false? {{ claim }}'
    ctxflow batch texts.csv -o vectors.parquet -m package:MODEL -t embed
    ctxflow batch texts.csv -o labels.jsonl -m MODEL -t classify \\
      --label true --label false
    ctxflow batch rows.jsonl -o results.jsonl --function my_module:my_app
    ctxflow batch --job night.toml --site campus.toml
    zcat claims.jsonl.gz | ctxflow batch - -o results.jsonl -m MODEL

    Stop it with Ctrl-C, or kill it, and run the same command again: it computes
    what is missing. Rows that fail go to OUTPUT.errors.jsonl, with the place,
    the reason and the worker's traceback, and the others continue;
    --retry-errors retries those rows. OUTPUT.progress records what is done.

    \b
    Exit status
      0    every row has a result
      1    the job failed, the reason is printed; or another driver writes there
      2    refused before anything was started: another command line fixes it
      3    some rows failed
      4    a limit of GPU-hours or cost of the site is reached; what was done
           is kept
      130  interrupted; what was done is kept
    """
    from ctxflow.batch.job_files import STANDARD

    chosen = load_job(job, **given)
    filtering = chosen.output == STANDARD
    _check_streams(chosen.input == STANDARD, filtering, dry_run, detach, retry_errors, as_json)
    if dry_run:
        from ctxflow.batch.preparation import preview, preview_text

        found = preview(chosen)
        print(json.dumps(found) if as_json else preview_text(found))
        return
    output = "standard output" if filtering else str(chosen.output)
    try:
        how = {"fresh": fresh, "retry_errors": retry_errors}
        outcome = _run(chosen, output, metrics, detach, quiet, as_json, **how)
    except KeyboardInterrupt:
        kept = "what was written is all there is" if filtering else _KEPT
        print(timed(f"ctxflow: interrupted; {kept}"), file=sys.stderr)
        raise typer.Exit(130) from None
    if outcome is None:
        return
    if as_json:
        print(json.dumps({name: getattr(outcome, name) for name in _FIGURES}))
    elif not quiet:
        _tell(outcome, "standard-output" if filtering else output, filtering)
    raise typer.Exit(outcome.exit_status)


def _run(
    job: Job, output: str, metrics: str | None, detach: bool, quiet: bool, as_json: bool, **how: bool
) -> Outcome | None:
    """Run a job with the standard input and output where it names them; None if it was submitted."""
    from ctxflow.batch.display import make_display
    from ctxflow.batch.driver import run_job
    from ctxflow.batch.job_files import STANDARD, to_output, with_input

    display, place = make_display(quiet, output, job.output == STANDARD), metrics_place(metrics)
    _end_as_by_ctrl_c()
    with contextlib.ExitStack() as stack:
        passed_on = None
        if job.output == STANDARD:
            job, passed_on = stack.enter_context(to_output(job, sys.stdout.fileno(), display.note))
        if job.input == STANDARD:
            job = with_input(job, sys.stdin.buffer, display.note)
        if detach:
            from ctxflow.cli.detached_commands import submit_detached

            if submit_detached(job, metrics, quiet, as_json, **how):
                return None
            how = {}  # All is done: what follows says so.
        return run_job(job, display=display, metrics=place, passed_on=passed_on, **how)


_KEPT = "what is done is kept, the same command goes on from there"
_FIGURES = (
    "done", "dead", "done_now", "dead_now", "seconds", "already", "truncated_now", "limited_now", "nulled", "altered",
    "summary",
)  # fmt: skip


def _tell(outcome: Outcome, output: str, filtering: bool) -> None:
    from ctxflow.batch.display import unheard
    from ctxflow.batch.driver import summary
    from ctxflow.observe.summary import summary_text

    with unheard():
        print(timed(f"ctxflow: {summary(outcome, output, goes_on=not filtering)}"), file=sys.stderr)
        if outcome.summary is not None:
            print(f"\n{summary_text(outcome.summary)}", file=sys.stderr)


def _check_streams(reads: bool, writes: bool, dry_run: bool, detach: bool, retry_errors: bool, as_json: bool) -> None:
    """Refuse the standard input and output where they cannot be used."""
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
    """Take SIGTERM, a batch system's way to end a job, and SIGHUP, a terminal's, for Ctrl-C: what is done is kept."""
    terminal = [number for number in (1, 2) if os.isatty(number)]
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # In the background of a script, to the terminal's Ctrl-C.
    ended: list[int] = []

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        if ended or not deaf:
            signal.default_int_handler(number, frame)

    def end(number: int, frame: types.FrameType | None) -> None:
        ended.append(number)
        signal.raise_signal(signal.SIGINT)  # Which those parts wait for that must not be interrupted.

    def hang_up(number: int, frame: types.FrameType | None) -> None:
        for descriptor in terminal:  # It is gone: what is printed there from now on would raise.
            lead_nowhere(descriptor)
        end(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # As it is under nohup.
        signal.signal(signal.SIGHUP, hang_up)


_HEAD = """# Options of `ctxflow batch`, and keys of a job file

This page is generated from the options (`python -m ctxflow.cli.batch_command`). A job file, TOML or JSON, holds any
of the keys, and a flag overrides the file's key; [batch.md](batch.md) explains them. The flags that are not part
of a job (`--job`, `--dry-run`, `--fresh`, ...) are in `ctxflow batch --help`.
"""


def reference() -> str:
    """Return the reference of all keys, as Markdown."""
    sections: dict[str, list[str]] = {}
    for name, said in options().items():
        shown = ", ".join(f"`{flag}`" for flag in flags(name, said)) if said.panel else f"`{said.metavar}`"
        free = "yes" if said.free else ""
        text = said.help.replace("|", "\\|")
        sections.setdefault(said.panel or "Input", []).append(
            f"| {shown} | `{name}` | {_kind(name)} | {free} | {text} |"
        )
    parts = [_HEAD, "*Free* keys may change from one run of a job to the next: no result depends on them.\n"]
    for title, lines in sections.items():
        parts += [f"## {title}\n", "| flag | key | value | free | meaning |", "| --- | --- | --- | --- | --- |"]
        parts += [*lines, ""]
    return "\n".join(parts)


def _kind(name: str) -> str:
    kind = _plain(name)
    origin, several = typing.get_origin(kind), ""
    if origin is tuple:
        kind, several = typing.get_args(kind)[0], "list of "
        origin = typing.get_origin(kind)
    if origin is Literal:
        return several + ", ".join(f"`{each}`" for each in typing.get_args(kind))
    words: Mapping[Any, str] = {int: "whole number", float: "number", dict: "table"}
    return several + words.get(origin or kind, "texts" if several else "text")


if __name__ == "__main__":
    print(reference(), end="")
