"""A batch job: every choice that flags and job files may make, checked."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from ctxflow.batch.job_option import PARAMETERS, ROWS, RUN, WHAT, WHERE, Option, error_limit
from ctxflow.errors import UsageError, closest
from ctxflow.files import text_of

if TYPE_CHECKING:
    from ctxflow.rows.formats import Reading

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_URL = re.compile(r"[A-Za-z][\w+.-]*://")
# A job that says nothing of them is what it was before.
_LATER = ("engine_options", "server_command", "adapter", "models", "answer_schema")
_COLUMNS = {"generate": "prompt", "classify": "text", "embed": "text", "chat": "messages"}


class Job(pydantic.BaseModel):
    """A batch job: its input and output, what is done with each row, and where.

    Each key is declared here and nowhere else: the options of `ctxflow batch`, the keys of job files and the reference
    (docs/batch-options.md) are made of it.

    :raises pydantic.ValidationError: for a choice that makes no sense, or two that exclude each other.

    >>> Job(input="in.jsonl", output="out.jsonl", model="package:some_encoder", task="embed").columns
    ('text',)
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    input: Annotated[
        Path,
        Option(
            "OpenAI batch requests, JSON Lines, CSV, text lines, Parquet; a folder of these, a dataset or documents.",
            "", metavar="INPUT", free=True,
        ),
    ]  # fmt: skip
    model: Annotated[str | None, Option("A folder, package:NAME, or a hub id.", WHAT, ("-m", "--model"))] = None
    models: Annotated[
        dict[str, str],
        Option(
            "In place of --model, a model for the rows whose 'model' is NAME; may be given again.",
            WHAT, ("--named-model",), metavar="NAME=MODEL",
        ),
    ] = {}  # fmt: skip
    task: Annotated[
        Literal["generate", "chat", "embed", "classify"] | None,
        Option("By default generate; for OpenAI's requests, their own task.", WHAT, ("-t", "--task")),
    ] = None
    function: Annotated[
        str | None,
        Option("Your own batch_app (or a function over lists) in place of a model.", WHAT, metavar="MODULE:NAME"),
    ] = None
    constants: Annotated[
        dict[str, Any],
        Option("A constant of that function; may be given again.", WHAT, ("--set",), metavar="NAME=VALUE"),
    ] = {}
    label: Annotated[tuple[str, ...], Option("For classify: a label; may be given again.", WHAT)] = ()
    template: Annotated[
        str | None,
        Option("The prompt, made from the row's columns: a Jinja2 template, or @FILE.", WHAT, metavar="TEXT"),
    ] = None
    system: Annotated[str | None, Option("For chat: the system message, also a template.", WHAT, metavar="TEXT")] = None
    answer_schema: Annotated[
        str | None,
        Option(
            "For a language model: a file with the JSON schema that answers keep to; its properties become columns.",
            WHAT, ("--schema",), metavar="FILE",
        ),
    ] = None  # fmt: skip
    output: Annotated[
        Path,
        Option(
            "Results: .jsonl, .csv, .tsv or .parquet; JSON Lines without an extension.",
            ROWS, ("-o", "--output"), free=True,
        ),
    ]  # fmt: skip
    column: Annotated[
        tuple[str, ...],
        Option(
            "The column to read, if not 'prompt' (generate), 'text' (embed, classify) or 'messages' (chat). "
            "For a function: one for each of its parameters.",
            ROWS,
        ),
    ] = ()
    id_column: Annotated[str | None, Option("The column that identifies rows; by default their numbers do.", ROWS)] = (
        None
    )
    keep: Annotated[tuple[str, ...], Option("A column to copy to the results; may be given again.", ROWS)] = ()
    split: Annotated[str | None, Option("The split of a dataset.", ROWS)] = None
    delimiter: Annotated[
        str | None, Option("The delimiter of CSV values: ';', tab; by default a comma.", ROWS, metavar="CHARACTER")
    ] = None
    encoding: Annotated[
        str | None,
        Option(
            "The encoding of text, such as cp1252; by default UTF-8, or that of a byte order mark.",
            ROWS,
            metavar="NAME",
        ),
    ] = None
    limit: Annotated[
        int | None,
        Option("Only the first rows; a larger limit continues from there.", ROWS, metavar="N", free=True),
        pydantic.Field(ge=1),
    ] = None
    input_format: Annotated[
        Literal["openai", "jsonl", "csv", "text", "parquet", "dataset", "documents"] | None,
        Option("By default recognised by name and content; of documents, each file is a row.", ROWS),
    ] = None
    output_format: Annotated[
        Literal["openai", "jsonl", "csv", "parquet"] | None, Option("By default that of the output's extension.", ROWS)
    ] = None
    order: Annotated[
        Literal["completed", "input"],
        Option("Write results as they are completed (the default), or in the order of the input.", ROWS, free=True),
    ] = "completed"
    max_new_tokens: Annotated[
        int | None, Option("The maximum; 256 by default, and for OpenAI's requests as they have it.", PARAMETERS)
    ] = None
    temperature: Annotated[float | None, Option("0, the default, is greedy decoding.", PARAMETERS)] = None
    top_p: Annotated[
        float | None, Option("Sample among the likeliest tokens with this total probability.", PARAMETERS)
    ] = None
    top_k: Annotated[int | None, Option("Sample among this many of the likeliest tokens.", PARAMETERS)] = None
    seed: Annotated[int | None, Option("The same seed and prompt give the same text.", PARAMETERS)] = None
    stop: Annotated[tuple[str, ...], Option("End at this text; may be given again.", PARAMETERS)] = ()
    row_parameter: Annotated[
        tuple[Literal["max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop"], ...],
        Option("Take this parameter from the row's column of that name; may be given again.", PARAMETERS),
    ] = ()
    site: Annotated[str, Option("A site file; by default this machine.", WHERE, ("-s", "--site"), free=True)] = "local"
    workers: Annotated[
        int | None, Option("Number of workers, if not the site's.", WHERE, free=True), pydantic.Field(ge=1)
    ] = None
    gpus: Annotated[int | None, Option("GPUs that the model needs.", WHERE, free=True), pydantic.Field(ge=0)] = None
    backend: Annotated[
        Literal["transformers", "vllm", "server"],
        Option("What runs the model: a library, or a server that each worker starts.", WHERE),
    ] = "transformers"
    engine_options: Annotated[
        dict[str, Any],
        Option(
            "An option of that engine, by its own name; may be given again.",
            WHERE, ("--engine-option",), metavar="NAME=VALUE",
        ),
    ] = {}  # fmt: skip
    server_command: Annotated[
        str | None,
        Option("For the backend server: what starts it, such as 'llama-server -m {model}'.", WHERE, metavar="COMMAND"),
    ] = None
    adapter: Annotated[
        dict[str, str],
        Option("A LoRA adapter that a request's model may name; may be given again.", WHERE, metavar="NAME=PATH"),
    ] = {}
    dtype: Annotated[str | None, Option("The weights' type, such as float32 or bfloat16.", WHERE)] = None
    device: Annotated[str | None, Option("Such as cpu or cuda; by default the best available.", WHERE, free=True)] = (
        None
    )
    max_input_tokens: Annotated[
        int | None, Option("The maximum length of inputs, if below the model's.", WHERE), pydantic.Field(ge=1)
    ] = None
    too_long: Annotated[
        Literal["error", "cut-start", "cut-end"],
        Option(
            "Inputs that are too long become dead letters (error, the default), or are truncated at their start or "
            "end, which their results record.",
            WHERE,
        ),
    ] = "error"
    batch_size: Annotated[
        int | None,
        Option("Rows that a worker gets at a time; of an engine, that it has in flight at most.", WHERE, free=True),
        pydantic.Field(ge=1),
    ] = None
    timeout: Annotated[
        float | None,
        Option("The maximum of seconds for such a batch, or for each row of an engine.", WHERE, free=True),
        pydantic.Field(gt=0),
    ] = None
    retries: Annotated[
        int, Option("How often a row that raises is retried.", WHERE, free=True), pydantic.Field(ge=0)
    ] = 0
    max_errors: Annotated[
        str | None,
        Option(
            "End the job when more than this number or share of rows fails in this run; by default when each of "
            "the first 100 does.",
            RUN, metavar="N|P%", free=True,
        ),
    ] = None  # fmt: skip
    _file: Path | None = pydantic.PrivateAttr(None)
    _called: str = pydantic.PrivateAttr("")

    @pydantic.field_validator("input", "output", mode="before")
    @classmethod
    def _path(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        if isinstance(given, str) and _URL.match(given):
            how = f"fetch it first, as with curl -LO {given}, and name" if info.field_name == "input" else "name"
            raise ValueError(f"the {info.field_name} {given} is a URL, not a file: {how} the file")
        return given

    @pydantic.field_validator("delimiter", mode="before")
    @classmethod
    def _separates(cls, given: Any) -> Any:
        text = {"\\t": "\t", "tab": "\t"}.get(given, given) if isinstance(given, str) else given
        if isinstance(text, str) and (len(text) != 1 or text in '"\r\n'):
            raise ValueError(f"the delimiter cannot be {text!r}: give one character, such as ';', or tab")
        return text

    @pydantic.field_validator("encoding")
    @classmethod
    def _encodes(cls, given: str | None) -> str | None:
        from ctxflow.rows.formats import check_encoding

        return None if given is None else check_encoding(given)

    @pydantic.field_validator("max_errors", mode="before")
    @classmethod
    def _most(cls, given: Any) -> Any:
        text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
        if isinstance(text, str):
            error_limit(text)
        return text

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Job:
        if [self.model is None, not self.models, self.function is None].count(False) != 1:
            raise ValueError("a job needs a model or a function, and not both: give --model, or --function")
        for model in (each for each in (self.model, *self.models.values()) if each is not None):
            if not model:
                raise ValueError("a model is called '': give a folder, a model of the hub, or package:NAME")
            if _URL.match(model):
                hub = re.fullmatch(r"https://(?:www\.)?huggingface\.co/([^/]+/[^/?#]+)/?", model)
                what = f"name it as the hub does: {hub[1]}" if hub else "fetch it into a folder, and name that"
                raise ValueError(f"the model {model} is a URL: {what}")
        if sentence := next((sentence for wrong, sentence in self._rules() if wrong), None):
            raise ValueError(sentence)
        return self

    def _rules(self) -> tuple[tuple[object, str], ...]:
        """Return what excludes each other, and what to say of it."""
        own, task = self.function is not None, self.task
        decided = task or self.label or self.parameters or self.row_parameter or self.answer_schema
        classifies = task == "classify"
        both = set(self.row_parameter) & set(self.keep)
        return (
            (
                own and decided,
                "a function decides itself what it does: leave tasks, labels, --schema and parameters out",
            ),
            (own and self.too_long != "error", "a function decides itself what is too long: leave --too-long out"),
            (self.constants and not own, "constants are a function's: give --function, or leave --set out"),
            (classifies and len(self.label) < 2, "to classify takes two labels or more: give --label for each"),
            (self.answer_schema and task in ("embed", "classify"), "a schema is for what a model writes: leave it out"),
            (self.label and not classifies, "labels are for classifying: give --task classify"),
            *self._engine_rules(own, classifies),
            (self.system is not None and task != "chat", "a system message is for conversations: give --task chat"),
            (not own and len(self.column) > 1, "a model reads one column: make one text of several with --template"),
            (self.template is not None and self.column, "a template names its columns itself: leave --column out"),
            (both, "a column cannot be both kept and a parameter"),
        )

    def _engine_rules(self, own: bool, classifies: bool) -> tuple[tuple[object, str], ...]:
        """Return what excludes each other of what is said about the engine, and what to say of it."""
        serves, of_vllm = self.backend == "server", self.backend == "vllm"
        reads = self.dtype or self.device or self.max_input_tokens or self.too_long != "error"
        engine = self.engine_options or self.adapter or self.server_command or self.backend != "transformers"
        return (
            (own and engine, "a function has its own context: leave --backend, --engine-option and the like to it"),
            (classifies and engine, "labels are chosen by transformers alone: leave --backend and what is with it out"),
            (serves and not self.server_command, "a server is started by a command: give --server-command"),
            (self.server_command and not serves, "a command is for --backend server: give that, or leave it out"),
            (serves and reads, "a server reads inputs, and loads the model, as its own command says: leave --dtype, "
             "--device, --max-input-tokens and --too-long out"),
            (of_vllm and reads and self.task == "embed" and (self.max_input_tokens or self.too_long != "error"),
             "vLLM's embeddings are of whole inputs: leave --max-input-tokens and --too-long out"),
            (self.adapter and not of_vllm, "adapters are for --backend vllm; a server's command names its own"),
            (self.adapter and self.models, "adapters are of one model: give --model, or leave --adapter out"),
        )  # fmt: skip

    @pydantic.model_validator(mode="after")
    def _samples(self) -> Job:
        if parameters := self.parameters:
            from ctxflow.models.results import Sampling

            try:
                Sampling(**parameters)
            except TypeError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def file(self) -> Path | None:
        """Return the job file that it was read from."""
        return self._file

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the generation parameters that were given."""
        from ctxflow.models.results import GENERATION

        return {name: value for name in GENERATION if (value := getattr(self, name)) not in (None, ())}

    def by_model(self) -> dict[str, Job]:
        """Return the job as it is for each of its models, by the name that rows have for it; "" where it has but one.

        >>> job = Job(input="in.csv", output="out.csv", models={"small": "org/small", "large": "org/large"})
        >>> {name: each.model for name, each in job.by_model().items()}
        {'small': 'org/small', 'large': 'org/large'}
        """
        each = {name: self.model_copy(update={"model": model, "models": {}}) for name, model in self.models.items()}
        return each or {"": self}

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that a model's task or a function reads; none for whole rows or a template."""
        if self.column or self.template is not None or self.task is None:
            return self.column
        return (_COLUMNS[self.task],)

    @property
    def reading(self) -> Reading:
        """Return how the input is to be read."""
        from ctxflow.rows.formats import Reading

        return Reading(self.input_format, self.split, self.delimiter, self.encoding, self._called)

    def reads_copy(self, copy: Path, of: str) -> Job:
        """Return the job with a copy as its input, which messages name by what it was copied of."""
        job = self.model_copy(update={"input": copy})
        job._called = of
        return job

    @functools.cached_property
    def schema_of_answers(self) -> dict[str, Any] | None:
        """Return the JSON schema that answers keep to, None without one.

        :raises ValueError: if its file cannot be read, or holds none.
        """
        if self.answer_schema is None:
            return None
        itself = self.answer_schema.startswith("{")
        called = "the schema" if itself else f"the schema {self.answer_schema}"
        try:
            found = json.loads(self.answer_schema if itself else text_of(self.answer_schema))
        except OSError as error:
            raise ValueError(f"{called} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{called} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{called} is no JSON schema: write an object")
        return found

    def identity(self) -> dict[str, Any]:
        """Return what the results depend on, as JSON: a job that differs here is another job."""
        from ctxflow.batch.templates import template_text

        chosen = self.model_dump(mode="json", exclude={name for name, option in options().items() if option.free})
        for name in ("template", "system"):
            if chosen[name] is not None:
                chosen[name] = template_text(chosen[name])
        if self.answer_schema is not None:
            chosen["answer_schema"] = json.dumps(self.schema_of_answers)
        for name in _LATER:
            if chosen[name] == Job.model_fields[name].default:
                del chosen[name]
        return chosen


def options() -> dict[str, Option]:
    """Return the help of each key of a job, in the order of `ctxflow batch --help`."""
    return {
        name: next(each for each in field.metadata if isinstance(each, Option))
        for name, field in Job.model_fields.items()
    }


def defaults() -> dict[str, Any]:
    """Return the settings of `Job.identity` by default."""
    return load_job(None, input="in", output="out", model="any").identity() | {"model": None}


def load_job(file: Path | None, **flags: Any) -> Job:
    """Return the job of a TOML (or JSON) file and of flags, which come first; None and empty flags say nothing.

    The file's keys are the flags' names with underscores, such as `max_new_tokens = 64`.

    :raises UsageError: for a key or value that makes no sense, saying what to write.
    """
    try:
        values = _read(file) if file is not None else {}
    except ValueError as error:
        raise UsageError(str(error)) from None
    values.update({name: value for name, value in flags.items() if value not in (None, [], {}, ())})
    try:
        job = Job(**values)
    except pydantic.ValidationError as error:
        raise UsageError("; ".join(_explain(dict(each)) for each in error.errors())) from None
    job._file = file
    return job


def _read(path: Path) -> dict[str, Any]:
    try:
        text = text_of(path)
        values: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"the job file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object: write the options by their names")
    return values


def _explain(error: dict[str, Any]) -> str:
    if not error["loc"] or error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    key = str(error["loc"][0])
    if error["type"] == "missing":
        return f"a job needs its {key}: give it on the command line or in the job file"
    if error["type"] == "extra_forbidden":
        close = closest(key, Job.model_fields)
        hint = f"did you mean {close!r}?" if close else f"its keys are {', '.join(Job.model_fields)}"
        return f"a job has no key {key!r}: {hint}"
    return f"{key} cannot be {error['input']!r}: {error['msg'].lower()}"
