"""Inputs that are broken in any way: each row has a result or a dead letter with its place, and nothing else happens.

Valid files of every form are mutated: bytes flipped, lines cut, joined, repeated, made huge. What good rows are is
found again here by other means than the readers'.
"""

import contextlib
import csv
import json
import os
import re

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from batch_helpers import Notes, read_lines
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ctxflow.batch import load_job, work
from ctxflow.batch.driver import run_job
from ctxflow.errors import one_line
from ctxflow.rows import formats

COUNT = 12
LONGEST = 2000  # Bytes that a line may have here, in place of 16 MiB.
BOM = b"\xef\xbb\xbf"
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")  # Not shown as they are.
TEXTS = [f"text {n} é" if n % 3 else f"some text, {n}" for n in range(COUNT)]


@pytest.fixture(scope="module", autouse=True)
def short_rows(executor):
    """Jobs of properties run on one executor, too, which `shared` is not for: it ends with each test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "BareExecutor", lambda site: contextlib.nullcontext(executor))
        patch.setattr(formats, "MAX_ROW_BYTES", LONGEST)
        yield


def is_one_line(text):
    return not OBEYED.search(text) and len(text) <= 2000


def run(path, **choices):
    """Run a job; gives its sentence if it ends with one, its results, its dead letters, by their rows' numbers."""
    output = choices.pop("output", path.with_name("out.jsonl"))
    function = choices.pop("function", "batch_functions:shout")
    job = load_job(None, input=path, output=output, function=function, workers=1, **choices)
    said = Notes()
    try:
        outcome = run_job(job, display=said)
        sentence = ""
    except ValueError as error:  # What the command prints as one line, with exit status 1.
        sentence = str(error)
        assert sentence and "Traceback" not in sentence
        for line in sentence.split("\n  - "):  # Several, where several things are wrong.
            assert is_one_line(line)
    text_lines = [output, output.with_name(f"{output.name}.errors.jsonl")]
    listed = [read_lines(file) if file.exists() else [] for file in text_lines]
    results, dead = [{each["row"]: each for each in lines} for lines in listed]
    counts = len(results), len(dead)
    assert counts == tuple(map(len, listed)) and not set(results) & set(dead), "no row is there twice"
    if not sentence:
        assert counts == (outcome.done, outcome.dead)
        assert run_job(job).already
    for number, letter in dead.items():
        assert letter["place"].startswith(str(path)) and letter["error"]["message"]
        assert letter["error"]["code"] != "InvalidRow" or is_one_line(letter["error"]["message"])
        assert str(number) in letter["place"] or str(number + 1) in letter["place"]
    told = [line for line in said.said if line.startswith(one_line(str(path)))]
    assert len(told) >= min(10, len(dead)) and all(map(is_one_line, said.said))
    return sentence, results, dead


MUTATIONS = ("flip", "insert", "cut", "delete line", "join", "repeat", "huge", "swap", "truncate")


@st.composite
def mutated(draw, data):
    """Bytes of a valid file with up to four changes."""
    for _ in range(draw(st.integers(0, 4))):
        if not data:
            break
        kind = draw(st.sampled_from(MUTATIONS))
        place = draw(st.integers(0, len(data) - 1))
        if kind == "flip":
            data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
        elif kind == "insert":
            piece = draw(
                st.sampled_from([b'"', b"\n", b"\r", b",", b"\0", b"\xff", b"\xef\xbb\xbf", b"{}", b"[" * 500])
            )
            data = data[:place] + piece + data[place:]
        elif kind == "truncate":
            data = data[:place]
        else:
            lines = data.split(b"\n")
            n = draw(st.integers(0, len(lines) - 1))
            other = draw(st.integers(0, len(lines) - 1))
            if kind == "cut":
                lines[n] = lines[n][: draw(st.integers(0, len(lines[n])))]
            elif kind == "delete line":
                del lines[n]
            elif kind == "join":
                lines[n : n + 2] = [b"".join(lines[n : n + 2])]
            elif kind == "repeat":
                lines.insert(n, lines[other])
            elif kind == "huge":
                if len(lines[n]) <= LONGEST:  # Made huge four times, a line would have terabytes.
                    lines[n] = lines[n].replace(b"text", b"text" * 600)
            else:
                lines[n], lines[other] = lines[other], lines[n]
            data = b"\n".join(lines)
    assume(not formats._seems_utf16(data[:4]))  # Of which all is refused.
    return data


def fuzz(test):
    return settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))(test)


def good_lines(data):
    """The numbers of lines that are objects, and what is in them; those of lines that are bad."""
    good, bad = {}, set()
    lines = data.split(b"\n")
    if len(lines[0]) < LONGEST:
        lines[0] = lines[0].removeprefix(BOM)
    for number, line in enumerate(lines):
        try:
            values = json.loads(line.decode()) if len(line) <= LONGEST else None
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict):
            good[number] = values
        elif line.strip() or len(line) > LONGEST:
            bad.add(number)
    return good, bad


@fuzz
@given(data=mutated("".join(json.dumps({"id": f"i{n}", "text": text}) + "\n" for n, text in enumerate(TEXTS)).encode()))
def test_json_lines_by_id(executor, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "in.jsonl"
    path.write_bytes(data)
    sentence, results, dead = run(path, id_column="id", column=["text"], input_format="jsonl")
    assert not sentence
    good, bad = good_lines(data)
    assert results.keys() | dead.keys() == good.keys() | bad
    seen = set()
    for number, values in good.items():
        identifier = values.get("id")
        named = isinstance(identifier, (str, int)) and not isinstance(identifier, bool) and identifier != ""
        runs = named and str(identifier) not in seen and isinstance(values.get("text"), str)
        if named:
            seen.add(str(identifier))
        assert (number in results) == runs
        if runs:
            assert results[number]["result"] == values["text"].upper() and results[number]["id"] == identifier


@fuzz
@given(
    data=mutated(
        "".join(
            json.dumps({"custom_id": f"i{n}", "method": "POST", "url": "/v1/embeddings", "body": {"input": text}})
            + "\n"
            for n, text in enumerate(TEXTS)
        ).encode()
    )
)
def test_openai_requests(executor, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "in.jsonl"
    path.write_bytes(data)
    sentence, results, dead = run(path, column=["body"], input_format="openai")
    assert not sentence
    good, bad = good_lines(data)
    assert results.keys() | dead.keys() == good.keys() | bad
    for number in results:
        assert results[number]["result"] == good[number]["body"]["input"].upper()
    firsts = {}
    for number, values in good.items():
        if isinstance(values.get("custom_id"), str) and values["custom_id"]:
            firsts.setdefault(values["custom_id"], number)
    whole = {n for n in firsts.values() if isinstance(good[n].get("body"), dict)}
    assert {n for n in whole if isinstance(good[n]["body"].get("input"), str)} <= results.keys()


def good_records(data):
    """The numbers of records that have as many fields as the header, and their fields; how many there are.

    For files in which no quotes can make a record of several lines.
    """
    header, *records = [line for line in data.removeprefix(BOM).split(b"\n") if line] or [b""]
    good = {}
    for number, line in enumerate(records):
        with contextlib.suppress(ValueError):
            fields = line.decode().split(",")
            if len(line) <= LONGEST and len(fields) == header.count(b",") + 1:
                good[number] = dict(zip(header.split(b","), fields, strict=True))
    return good, len(records)


@fuzz
@given(
    data=mutated(("id,text\n" + "".join(f"{n},{t.replace(',', '')}\n" for n, t in enumerate(TEXTS))).encode()),
    quoted=st.booleans(),
)
@example(data=b"id,text\n0,some text 0\n1\x80text 1 \xc3\xa9", quoted=True)  # Its header has three lines.
def test_csv(executor, tmp_path_factory, data, quoted):
    path = tmp_path_factory.mktemp("fuzz") / "in.csv"
    if quoted:
        data = data.replace(b",text", b',"text').replace(" é".encode(), 'é"'.encode())
    path.write_bytes(data)
    sentence, results, dead = run(path, column=["text"])
    if sentence:
        # Told of the beginning: a header that cannot be read, has no such column, or is of another encoding.
        assert re.search("header|has no column 'text'|UTF-16", sentence) and not results and not dead
        return
    assert sorted(results.keys() | dead.keys()) == list(range(len(results) + len(dead)))
    if not {b'"', b"\r", b"\0"} & {bytes([byte]) for byte in data}:
        good, count = good_records(data)
        assert len(results) + len(dead) == count
        expected = {n: fields[b"text"].upper() for n, fields in good.items() if b"text" in fields}
        assert {n: each["result"] for n, each in results.items()} == expected


NAMES = st.text(st.sampled_from("ab \n\r\t\x1b\x7f\x85\x9b\u2028\u202e\"',;{}%é"), min_size=1, max_size=8)
LONG = st.sampled_from(["word " * 2000, "line\n" * 300])
FORMS = ("jsonl", "csv", "parquet", "dataset")


def written(folder, form, records):
    """Return the path of an input with these records."""
    path = folder if form == "dataset" else folder.with_name(f"{folder.name}.{form}")
    if form == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
    elif form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0], quoting=csv.QUOTE_ALL, lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
    else:
        table = pyarrow.Table.from_pylist(records)
        if form == "dataset":
            folder.mkdir()
        pyarrow.parquet.write_table(table, folder / "train.parquet" if form == "dataset" else path)
    return path


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    name=NAMES, column=st.one_of(NAMES, LONG), key=st.one_of(NAMES, LONG), identifier=st.one_of(NAMES, LONG),
    form=st.sampled_from(FORMS),
    way=st.sampled_from(
        ("column", "missing", "no id", "ids", "keep", "template", "undefined", "raises", "delimiter", "encoding",
         "form", "split", "cut", "encoded", "repeated", "function", "output")
    ),
)  # fmt: skip
@example(name=";", column=";", key="a", identifier=";", form="parquet", way="form")  # Of four lines.
def test_an_error_is_one_line_whatever_it_quotes(
    executor, tmp_path_factory, monkeypatch, name, column, key, identifier, form, way
):
    """Names of files and columns, and ids, through each reader and each refusal of it."""
    assume(column != key)
    monkeypatch.setattr(formats, "MAX_ROW_BYTES", 16 << 20)
    folder = tmp_path_factory.mktemp("named")
    path = written(folder / f"_{name}", form, [{column: text, key: identifier} for text in TEXTS])
    file = path / "train.parquet" if form == "dataset" else path
    if way == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif way == "encoded":
        file.write_bytes(file.read_bytes().replace("é".encode(), "é".encode("latin-1")))
    elif way == "repeated" and form == "csv":
        header = json.dumps(column, ensure_ascii=False).replace("\\n", "\n")
        file.write_text(f"{header},{header}\n")
    choices = {
        "missing": {"column": [f"{column}x"]},
        "no id": {"column": [column], "id_column": f"{key}x"},
        "ids": {"column": [column], "id_column": key},
        "keep": {"column": [column], "keep": [f"{key}x"]},
        "template": {"template": "{{ " + name},
        "undefined": {"template": "{{ row[" + repr(f"{key}x") + "] }}"},
        "raises": {"template": "{{ row[" + repr(key) + "] / 2 }}"},
        "delimiter": {"column": [column], "delimiter": ";"},
        "encoding": {"column": [column], "encoding": "utf-16"},
        "form": {"column": [column], "input_format": "openai"},
        "split": {"column": [column], "split": name},
        "function": {"function": f"{name}:{name}"},
        "output": {"column": [column], "output": folder / f"_{name}.out"},
    }.get(way, {"column": [column]})
    sentence, results, dead = run(path, max_errors="100%", **choices)
    if way == "form" and form in ("parquet", "dataset"):
        assert sentence or (dead and not results)  # It has lines, but by chance.
    elif way in ("missing", "keep", "no id", "form", "function", "output"):
        assert sentence or len(dead) >= COUNT  # Lines of a CSV header are rows of other forms.
    elif way == "ids":
        assert set(results) == {0} or sentence
    elif way == "column":
        assert len(results) == COUNT, sentence


def parquet_of(texts):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), sink, row_group_size=4, compression="none", use_dictionary=False
    )
    return sink.getvalue().to_pybytes()


@fuzz
@given(data=mutated(parquet_of(TEXTS)))
def test_parquet(executor, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "in.parquet"
    path.write_bytes(data)
    sentence, results, dead = run(path, column=["text"], input_format="parquet")
    assert sorted(results.keys() | dead.keys()) == list(range(len(results) + len(dead)))
    if data == parquet_of(TEXTS):
        assert not sentence and [results[n]["result"] for n in range(COUNT)] == [text.upper() for text in TEXTS]


@fuzz
@given(data=mutated(parquet_of(TEXTS)), arrow=st.booleans())
def test_dataset_folder(executor, tmp_path_factory, data, arrow):
    folder = tmp_path_factory.mktemp("fuzz") / "set"
    folder.mkdir()
    if arrow:
        sink = pyarrow.BufferOutputStream()
        table = pyarrow.table({"text": TEXTS})
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
        whole = sink.getvalue().to_pybytes()
        data = whole[: len(data) % (len(whole) + 1)]
        (folder / "data.arrow").write_bytes(data)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    else:
        (folder / "train.parquet").write_bytes(data)
    sentence, results, dead = run(folder, column=["text"])
    assert sorted(results.keys() | dead.keys()) == list(range(len(results) + len(dead)))
    if arrow:
        assert all(results[n]["result"] == TEXTS[n].upper() for n in results) and not dead
        assert sentence or len(results) == COUNT or len(data) < len(whole)


MIXED = ["text", 3, None, 1.5, True, ["a"], {"a": 1}, "", "\ud800", "x" * 1500, 10**400]


@pytest.mark.parametrize("whole", [False, True])
def test_values_of_mixed_types(executor, tmp_path, whole):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in MIXED))
    choices = {} if whole else {"column": ["text"]}
    sentence, results, dead = run(path, **choices)
    assert not sentence and len(results) + len(dead) == len(MIXED)
    assert {n for n, value in enumerate(MIXED) if isinstance(value, str)} == results.keys()


@pytest.mark.parametrize(
    ("name", "make", "sentence"),
    [
        ("pipe.jsonl", os.mkfifo, "a pipe or a device, which cannot be read again after a restart: save it"),
        ("folder.jsonl", os.mkdir, "is no dataset"),
        ("missing.jsonl", lambda path: None, "cannot be read: No such file or directory"),
        ("loop.jsonl", lambda path: os.symlink(path, path), "cannot be read: "),
        ("empty.parquet", lambda path: path.touch(), "is not a Parquet file"),
        ("in.zip", lambda path: path.write_bytes(b"PK\3\4..."), "is compressed"),
        ("in.bin", lambda path: path.write_bytes(bytes(range(256)) * 50), "cannot be told"),
    ],
)
def test_what_is_no_input_is_one_sentence(executor, tmp_path, name, make, sentence):
    make(tmp_path / name)
    told, results, dead = run(tmp_path / name, column=["text"])
    assert sentence in told and not results and not dead


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv", "blank.jsonl", "header.csv"])
def test_what_holds_no_rows_is_done_at_once(executor, tmp_path, name):
    (tmp_path / name).write_text({"blank.jsonl": "\n\n \n", "header.csv": "id,text\n"}.get(name, ""))
    assert run(tmp_path / name, column=["text"]) == ("", {}, {})
