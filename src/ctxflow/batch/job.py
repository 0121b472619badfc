"""A batch job: every choice that flags and job files may make, checked; and how a job ended."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import pydantic

from ctxflow.batch.templates import template_text
from ctxflow.errors import UsageError
from ctxflow.models.sampling import GENERATION, Sampling
from ctxflow.rows.inputs import Reading
from ctxflow.rows.text_lines import check_encoding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TASKS = ("generate", "chat", "embed", "classify")
# What another run of the same job may change: the results do not depend on it.
_FREE = {"input", "output", "site", "workers", "batch_size", "timeout", "retries", "order", "device", "gpus"}
_FREE |= {"max_errors", "limit"}
_URL = re.compile(r"[A-Za-z][\w+.-]*://")
_COLUMNS = {"generate": "prompt", "classify": "text", "embed": "text", "chat": "messages"}


def error_limit(text: str) -> tuple[int | None, float | None]:
    """Return the number or the share (in percent) of rows that `max_errors` allows to fail, the other as None.

    :raises ValueError: if it is neither.

    >>> error_limit("20"), error_limit("2.5%")
    ((20, None), (None, 2.5))
    """
    if re.fullmatch(r"\d+", text.strip()):
        return int(text), None
    share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
    if share is None or float(share[1]) > 100:
        raise ValueError(
            f"the most errors cannot be {text!r}: write a number of rows such as 20, or a share such as 5%"
        )
    return None, float(share[1])


class Job(pydantic.BaseModel):
    """A batch job: its input and output, what is done with each row, and where.

    :raises pydantic.ValidationError: for a choice that makes no sense, or two that exclude each other.

    >>> Job(input="in.jsonl", output="out.jsonl", model="package:some_encoder", task="embed").columns
    ('text',)
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    input: Path
    output: Path
    model: str | None = None
    function: str | None = None
    task: Literal["generate", "chat", "embed", "classify"] | None = None
    site: str = "local"
    workers: int | None = pydantic.Field(None, ge=1)
    input_format: Literal["openai", "jsonl", "csv", "text", "parquet", "dataset"] | None = None
    output_format: Literal["openai", "jsonl", "csv", "parquet"] | None = None
    split: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    limit: int | None = pydantic.Field(None, ge=1)
    column: tuple[str, ...] = ()
    template: str | None = None
    system: str | None = None
    id_column: str | None = None
    keep: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    row_parameter: tuple[Literal["max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop"], ...] = ()
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    backend: Literal["transformers", "vllm"] = "transformers"
    dtype: str | None = None
    device: str | None = None
    gpus: int | None = pydantic.Field(None, ge=0)
    max_input_tokens: int | None = pydantic.Field(None, ge=1)
    too_long: Literal["error", "cut-start", "cut-end"] = "error"
    constants: dict[str, Any] = {}
    batch_size: int | None = pydantic.Field(None, ge=1)
    timeout: float | None = pydantic.Field(None, gt=0)
    retries: int = pydantic.Field(0, ge=0)
    order: Literal["completed", "input"] = "completed"
    max_errors: str | None = None
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
        if (self.model is None) == (self.function is None):
            raise ValueError("a job needs a model or a function, and not both: give --model or --function")
        if self.model is not None and _URL.match(self.model):
            hub = re.fullmatch(r"https://(?:www\.)?huggingface\.co/([^/]+/[^/?#]+)/?", self.model)
            what = f"name it as the hub does: {hub[1]}" if hub else "fetch it into a folder, and name that"
            raise ValueError(f"the model {self.model} is a URL: {what}")
        if self.function is not None and (self.task or self.label or self.parameters or self.row_parameter):
            raise ValueError("a function decides itself what it does: leave tasks, labels and parameters to it")
        if self.function is not None and self.too_long != "error":
            raise ValueError("a function decides itself what is too long: leave --too-long out")
        if self.constants and self.function is None:
            raise ValueError("constants are a function's: give --function, or leave --set out")
        if self.task == "classify" and len(self.label) < 2:
            raise ValueError("to classify takes two labels or more: give --label for each")
        if self.label and self.task != "classify":
            raise ValueError("labels are for classifying: give --task classify")
        if self.backend == "vllm" and self.task in ("embed", "classify"):
            raise ValueError("vLLM serves to generate and to chat: leave --backend out")
        if self.system is not None and self.task != "chat":
            raise ValueError("a system message is for conversations: give --task chat")
        if self.function is None and len(self.column) > 1:
            raise ValueError("a model reads one column: make one text of several with --template")
        if self.template is not None and self.column:
            raise ValueError("a template names its columns itself: leave --column out")
        if set(self.row_parameter) & set(self.keep):
            raise ValueError("a column cannot be both kept and a parameter")
        Sampling(**self.parameters)
        return self

    @property
    def file(self) -> Path | None:
        """The job file that it was read from."""
        return self._file

    @property
    def parameters(self) -> dict[str, Any]:
        """The generation parameters that were given."""
        return {name: value for name in GENERATION if (value := getattr(self, name)) not in (None, ())}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a model's task or a function reads; none where the whole row or a template is read."""
        if self.column or self.template is not None or self.task is None:
            return self.column
        return (_COLUMNS[self.task],)

    @property
    def reading(self) -> Reading:
        """How the input is to be read."""
        return Reading(self.input_format, self.split, self.delimiter, self.encoding, self._called)

    def reads_copy(self, copy: Path, of: str) -> Job:
        """It with a copy as its input, which a person knows as what it was copied of."""
        job = self.model_copy(update={"input": copy})
        job._called = of
        return job

    def identity(self) -> dict[str, Any]:
        """What the results depend on, as JSON: a job that differs here is another job."""
        chosen = self.model_dump(mode="json", exclude=_FREE)
        for name in ("template", "system"):
            if chosen[name] is not None:
                chosen[name] = template_text(chosen[name])
        return chosen


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: all its rows are done or dead.

    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar seconds: that this run took.
    :ivar already: whether there was nothing to do, since an earlier run had finished.
    :ivar truncated_now: rows of this run whose input was too long and was cut, as `too_long` of the job said.
    :ivar nulled: values of this run that the output's form cannot hold, so that null stands in their place, by column;
        `altered`, texts and keys of dictionaries that had to be written otherwise.
    :ivar summary: of this run, as observe/summary.py makes it; None if nothing ran.

    >>> Outcome(done=3, dead=1, done_now=3, dead_now=1, seconds=1.0).exit_status
    3
    """

    done: int
    dead: int
    done_now: int
    dead_now: int
    seconds: float
    already: bool = False
    nulled: dict[str, int] = dataclasses.field(default_factory=dict)
    altered: dict[str, int] = dataclasses.field(default_factory=dict)
    summary: dict[str, Any] | None = None
    truncated_now: int = 0

    @property
    def exit_status(self) -> int:
        """0 if all rows have a result, 3 if some are dead."""
        return 3 if self.dead else 0


def defaults() -> dict[str, Any]:
    """The settings of `Job.identity` as they are where nothing is said.

    >>> defaults()["keep"], defaults()["backend"]
    ([], 'transformers')
    """
    return load_job(None, input="in", output="out", model="any").identity() | {"model": None}


def load_job(file: Path | None, **flags: Any) -> Job:
    """A job from a TOML (or JSON) file and from flags, which come first; None and empty flags say nothing.

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
        text = path.read_text(encoding="utf-8")
        values: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"the job file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no object: write the options by their names")
    return values


def _explain(error: dict[str, Any]) -> str:
    if not error["loc"]:
        return str(error["msg"]).removeprefix("Value error, ")
    key = str(error["loc"][0])
    if error["type"] == "missing":
        return f"a job needs its {key}: give it on the command line or in the job file"
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, Job.model_fields, n=1)
        return f"a job has no key {key!r}: " + (
            f"did you mean {close[0]!r}?" if close else f"its keys are {', '.join(Job.model_fields)}"
        )
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{key} cannot be {error['input']!r}: {error['msg'].lower()}"
