"""The options of `ctxflow batch`: what each is called, takes and says of itself, by the panels of its help.

What does not live here: what becomes of them (batch.py), and which of them go together (`ctxflow.batch.Job`).
"""

# No `from __future__ import annotations`: these are values, which typer reads.
import enum
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
    text = "text"
    parquet = "parquet"
    dataset = "dataset"


class OutputFormat(str, enum.Enum):
    """Forms of outputs."""

    openai = "openai"
    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


class Order(str, enum.Enum):
    """Orders of results."""

    completed = "completed"
    input = "input"


class TooLong(str, enum.Enum):
    """What becomes of inputs that are too long."""

    error = "error"
    cut_start = "cut-start"
    cut_end = "cut-end"


class Backend(str, enum.Enum):
    """Libraries that run language models."""

    transformers = "transformers"
    vllm = "vllm"


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="INPUT",
        show_default=False,
        help="OpenAI batch requests, JSON Lines, CSV, text lines, Parquet, or a folder of such files or a dataset's.",
    ),
]
Model = Annotated[str | None, _option("A folder, package:NAME, or a hub id.", _WHAT, "-m", "--model")]
TaskChoice = Annotated[
    Task | None,
    _option("By default generate; for OpenAI's requests what they ask for.", _WHAT, "-t", "--task"),
]
Function = Annotated[
    str | None,
    _option("Your own batch_app (or a function over lists) in place of a model.", _WHAT, metavar="MODULE:NAME"),
]
Constant = Annotated[
    list[str] | None,
    _option("A constant of that function; may be given again.", _WHAT, "--set", metavar="NAME=VALUE"),
]
Label = Annotated[list[str] | None, _option("To classify: a label; give one for each.", _WHAT)]
Template = Annotated[
    str | None,
    _option("Make the prompt of the row's columns: a Jinja2 template, or @FILE.", _WHAT, metavar="TEXT"),
]
System = Annotated[str | None, _option("To chat: the system message, a template likewise.", _WHAT, metavar="TEXT")]
Job = Annotated[Path | None, _option("A TOML file with any of these options; flags come first.", _WHAT, metavar="FILE")]
Output = Annotated[
    str | None,
    _option("Results: .jsonl, .csv, .tsv or .parquet; JSON Lines where there is no ending.", _ROWS, "-o", "--output"),
]
Column = Annotated[
    list[str] | None,
    _option(
        "The column to read, if not 'prompt' (generate), 'text' (embed, classify) or 'messages' (chat). "
        "For a function: one for each of its parameters.",
        _ROWS,
    ),
]
IdColumn = Annotated[
    str | None,
    _option("The column that names rows; without, they are known by their numbers.", _ROWS),
]
Keep = Annotated[list[str] | None, _option("A column to copy to the results; may be given again.", _ROWS)]
Split = Annotated[str | None, _option("Which part of a dataset.", _ROWS)]
Delimiter = Annotated[
    str | None, _option("What separates the values of CSV: ';', tab; by default a comma.", _ROWS, metavar="CHARACTER")
]
Encoding = Annotated[
    str | None,
    _option("Of text, such as cp1252; by default UTF-8, or as a byte order mark tells.", _ROWS, metavar="NAME"),
]
Limit = Annotated[
    int | None, _option("The first rows alone; a larger limit goes on from there.", _ROWS, "--limit", metavar="N")
]
InputFormatChoice = Annotated[InputFormat | None, _option("By default as the name and the beginning tell.", _ROWS)]
OutputFormatChoice = Annotated[OutputFormat | None, _option("By default as the output's name ends.", _ROWS)]
OrderChoice = Annotated[
    Order | None,
    _option("Write results as they are completed (the default), or in the order of the input.", _ROWS),
]
MaxNewTokens = Annotated[int | None, _option("At most so many; 256 by default.", _PARAMETERS)]
Temperature = Annotated[float | None, _option("0, the default, takes the likeliest token.", _PARAMETERS)]
TopP = Annotated[float | None, _option("Sample among the likeliest with this share.", _PARAMETERS)]
TopK = Annotated[int | None, _option("Sample among so many.", _PARAMETERS)]
Seed = Annotated[int | None, _option("The same seed and prompt give the same text.", _PARAMETERS)]
Stop = Annotated[list[str] | None, _option("End at this text; may be given again.", _PARAMETERS)]
RowParameter = Annotated[
    list[str] | None,
    _option("Take this parameter from the row's column of that name; may be given again.", _PARAMETERS),
]
Site = Annotated[str | None, _option("A site file; by default this machine.", _WHERE, "-s", "--site")]
Workers = Annotated[int | None, _option("How many, if not as the site says.", _WHERE)]
Gpus = Annotated[int | None, _option("GPUs that the model needs.", _WHERE)]
BackendChoice = Annotated[Backend | None, _option("The library for language models.", _WHERE)]
Dtype = Annotated[str | None, _option("Of the weights, such as float32 or bfloat16.", _WHERE)]
Device = Annotated[str | None, _option("Such as cpu or cuda; by default what is there.", _WHERE)]
MaxInputTokens = Annotated[int | None, _option("Longer inputs are too long, if not as the model says.", _WHERE)]
TooLongChoice = Annotated[
    TooLong | None,
    _option(
        "What becomes of inputs that are too long: a dead letter (error, the default), or a cut at their start or end, "
        "which their results tell.",
        _WHERE,
        "--too-long",
    ),
]
BatchSize = Annotated[int | None, _option("Rows that a worker gets at a time.", _WHERE)]
Timeout = Annotated[float | None, _option("Seconds that such a batch may take.", _WHERE)]
Retries = Annotated[int | None, _option("How often a row that raises is tried again.", _WHERE)]
MaxErrors = Annotated[
    str | None,
    _option(
        "End the job when more rows than that fail, or a larger share, in this run alone; by default when each of the "
        "first 100 does.",
        _RUN,
        "--max-errors",
        metavar="N|P%",
    ),
]
RetryErrors = Annotated[bool, _option("Try rows again that failed.", _RUN, "--retry-errors")]
DryRun = Annotated[
    bool, _option("Check all, show the first prompts and what would be done, and start nothing.", _RUN, "--dry-run")
]
Fresh = Annotated[bool, _option("Begin anew, and overwrite what is there.", _RUN, "--fresh")]
Quiet = Annotated[bool, _option("Print errors alone.", _RUN, "-q", "--quiet")]
AsJson = Annotated[bool, _option("Print the end's figures as JSON.", _RUN, "--json")]
Detach = Annotated[
    bool, _option("Submit the driver itself to HTCondor, and return: see ctxflow jobs.", _RUN, "--detach")
]
Metrics = Annotated[
    str | None,
    _option("Serve metrics for Prometheus there, at 127.0.0.1 if no address is given.", _RUN, metavar="[ADDRESS:]PORT"),
]
