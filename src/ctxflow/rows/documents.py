"""Documents: texts that are files of their own, each of them a row."""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctxflow.errors import InputError
from ctxflow.rows.formats import UNREADABLE, Reading, check_encoding, decompressed, encoding_of, in_chunks
from ctxflow.rows.source import MAX_ROW_BYTES, InputFiles, Row, RowError, left_out, opened, suffix_of

FILE, TEXT = "file", "text"
"""The columns of documents: the path in their folder, and the text."""

SUFFIXES = {".txt", ".text", ".md", ".markdown", ".rst", ".html", ".htm"}
_HTML = {".html", ".htm"}
_BEGINNING = 1 << 14


def files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and of all folders in it, without hidden ones, in the order of their paths.

    :raises ValueError: if one of the folders cannot be read.
    """
    found, seen, tops = list[Path](), set[str](), [folder]

    def refuse(error: OSError) -> None:
        raise InputError(f"the folder {error.filename} cannot be read: {error.strerror}")

    for top in tops:  # Links come last, so that a file is known by the path of the folder that it is in.
        for place, folders, names in os.walk(top, onerror=refuse):
            real = os.path.realpath(place)
            folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
            if real not in seen:
                tops += [path for name in folders if (path := Path(place, name)).is_symlink()]
                paths = [Path(place, name) for name in names if not name.startswith(".")]
                found += [path for path in paths if path.is_file()]
            seen.add(real)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def is_document(path: Path) -> bool:
    """Return whether a file is a document by its name.

    >>> is_document(Path("notes/Report.MD")), is_document(Path("page.html.gz")), is_document(Path("table.csv"))
    (True, True, False)
    """
    return suffix_of(path) in SUFFIXES


class DocumentSource(InputFiles):
    """Files with a text each: the rows have the columns "file", the path below `folder`, and "text".

    HTML is read as the text that a browser shows. A file that cannot be read is an error of its row alone.
    """

    def __init__(self, files: Sequence[Path], folder: Path, reading: Reading) -> None:
        super().__init__(files, reading.name or str(folder))
        self.total = len(files)
        self._folder = folder
        self._reading = reading
        self._read = 0

    def columns(self) -> Sequence[str]:
        """Return both."""
        return (FILE, TEXT)

    def fraction(self) -> float:
        """Return how many of the files are read."""
        return self._read / max(1, len(self.files))

    def place(self, number: int) -> str:
        """Return the file."""
        return str(self.files[number])

    def identity(self) -> str:
        """Return a digest of the files' names, sizes and beginnings."""
        found = hashlib.blake2b(digest_size=12)
        for path in self.files:
            found.update(f"{self._name(path)}\0".encode())
            with contextlib.suppress(InputError, OSError), opened(path) as file:  # Else it is an error of its row.
                found.update(f"{os.fstat(file.fileno()).st_size}\0".encode())
                found.update(file.read(_BEGINNING))
        return found.hexdigest()

    def chunks(self, skip: bytes = b"", columns: Sequence[str] = ()) -> Iterator[list[Row]]:
        """Yield the files' texts, some at a time."""
        for chunk in in_chunks(self._rows(skip)):
            self._read = chunk[-1].number + 1
            yield chunk
        self._read = len(self.files)

    def _rows(self, skip: bytes) -> Iterator[Row]:
        for number, path in enumerate(self.files):
            if left_out(skip, number):
                continue
            try:
                text = _text_of_document(path, self._reading)
            except ValueError as error:
                yield Row(number, RowError(str(error)), 0)
            else:
                yield Row(number, {FILE: self._name(path), TEXT: text}, len(text))

    def _name(self, path: Path) -> str:
        name = path.relative_to(self._folder).as_posix()
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _text_of_document(path: Path, reading: Reading) -> str:
    """Return a file's text, its lines ended by newlines alone.

    :raises ValueError: if it is too long, or is no text in its encoding.
    """
    try:
        with decompressed(path) as (data, _):
            read = data.read(MAX_ROW_BYTES + 1)
    except (*UNREADABLE, OSError) as error:
        raise RowError(f"the file cannot be read: {error}") from None
    if len(read) > MAX_ROW_BYTES:
        raise RowError(f"the file is longer than {MAX_ROW_BYTES >> 20} MiB")
    is_html = suffix_of(path) in _HTML
    mark, encoding = encoding_of(read, reading, "the file", _encoding_in_html(read) if is_html else "utf-8")
    try:
        text = read[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        known = encoding.upper()
        byte = f": byte {len(mark) + error.start + 1} is {error.object[error.start]:#04x}"
        raise RowError(f"the file is not {known}{byte}{reading.other_encoding(known)}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return text_of_html(text) if is_html else text


_CHARSET = re.compile(rb"""<meta\s[^>]{0,200}?charset\s{0,9}=\s{0,9}["']?([\w-]{1,40})""", re.IGNORECASE)
_AS_BROWSERS = {"iso8859-1": "cp1252", "ascii": "cp1252"}


def _encoding_in_html(data: bytes) -> str:
    """Return the encoding that a page names, as browsers take it; UTF-8 where it names none that is known.

    >>> _encoding_in_html(b'<meta charset="windows-1251">'), _encoding_in_html(b"<p>")
    ('cp1251', 'utf-8')
    """
    found = _CHARSET.search(data, 0, 4096)
    try:
        encoding = check_encoding(found[1].decode()) if found else "utf-8"
    except ValueError:
        return "utf-8"
    # A page that names one with two bytes a character, in single bytes, cannot be in it.
    return "utf-8" if encoding.startswith(("utf-16", "utf-32")) else _AS_BROWSERS.get(encoding, encoding)


_RAW = {"script", "style"}  # In which nothing is a tag but their own end.
_FOREIGN = {"svg", "math"}  # Whose tags may end themselves.
_SILENT = {"template", "noscript", "iframe", "object", "select", *_FOREIGN}
_BLOCKS = {
    "address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog", "div", "dl", "dt",
    "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "head", "header", "hr",
    "html", "legend", "li", "main", "nav", "ol", "p", "pre", "section", "summary", "table", "tbody", "tfoot", "thead",
    "title", "tr", "ul",
}  # fmt: skip
_APART = {"p", "h1", "h2", "h3", "h4", "h5", "h6", "table", "ul", "ol", "pre", "blockquote", "section", "article"}
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]{0,40})")
_IN_TAG = re.compile(r"""=\s*["']|>""")
_DEEPEST = 20  # Of silent parts in each other.


def _tokens(page: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a page, as ("", text), and its tags, as ("<", name) and ("</", name).

    The standard library's parser takes time in the square of what is broken. This one does not: what it has found to
    have no end, it looks for no more.
    """
    at, unclosed = 0, set[str]()
    while (begin := page.find("<", at)) >= 0:
        yield "", page[at:begin]
        if page.startswith("<!--", begin):
            at = _behind(page, "-->", begin + 4)
        elif page.startswith(("<!", "<?"), begin):
            at = _behind(page, ">", begin)
        elif tag := _TAG.match(page, begin):
            at = _end_of_tag(page, tag.end(), unclosed)
            name = tag[2].lower()
            if name in _FOREIGN and page[at - 2] == "/":
                continue
            if name in _RAW and not tag[1]:
                end = re.compile(f"</{name}", re.IGNORECASE).search(page, at)
                at = end.start() if end else len(page)
            elif name not in _RAW:
                yield f"<{tag[1]}", name
        else:
            yield "", "<"
            at = begin + 1
    yield "", page[at:]


def _behind(page: str, what: str, at: int) -> int:
    found = page.find(what, at)
    return len(page) if found < 0 else found + len(what)


def _end_of_tag(page: str, at: int, unclosed: set[str]) -> int:
    """Return where a tag ends, whose values may hold ">" in quotes; of one without an end, the end of the page."""
    while found := _IN_TAG.search(page, at):
        quote = found[0][-1]
        if quote == ">":
            return found.end()
        end = -1 if quote in unclosed else page.find(quote, found.end())
        if end < 0:
            unclosed.add(quote)
        at = found.end() if end < 0 else end + 1
    return len(page)


class _Shown:
    """The text that a page shows."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._end = "\n"  # Of what is collected.
        self._silent: list[str] = []  # Tags that are open, and whose text is not shown.
        self._preformatted = 0

    def begin(self, tag: str) -> None:
        """Begin a line where a block begins, and a cell apart from the one before."""
        if tag in _SILENT:
            self._silent += [tag] * (len(self._silent) < _DEEPEST)
        elif tag == "br":
            self._add("\n")
        elif tag in ("td", "th") and self._end != "\n":
            self._add("\t")
        elif tag in _BLOCKS:
            self._break(tag)
        self._preformatted += tag == "pre"

    def end(self, tag: str) -> None:
        """End the line where a block ends."""
        if tag in self._silent:
            while self._silent.pop() != tag:
                pass
        elif tag in _BLOCKS:
            self._break(tag)
        self._preformatted -= tag == "pre" and self._preformatted > 0

    def text(self, text: str) -> None:
        """Add text as it is shown: white space as one space, but in preformatted text."""
        text = html.unescape(text)
        if not self._preformatted:
            text = re.sub(r"\s+", " ", text)
            if self._end.isspace():
                text = text.removeprefix(" ")
        self._add(text)

    def _break(self, tag: str) -> None:
        self._add("\n\n" if tag in _APART else "\n" if self._end != "\n" else "")

    def _add(self, text: str) -> None:
        if text and not self._silent:
            self.parts.append(text)
            self._end = text[-1]


def text_of_html(page: str) -> str:
    """Return the text that a page shows: a line a block, without scripts and styles.

    >>> text_of_html("<title>A</title><h1>The <b>title</b></h1><p>One\\n line<br>two &amp; more<script>x()</script>")
    'A\\n\\nThe title\\n\\nOne line\\ntwo & more'
    """
    shown = _Shown()
    what = {"<": shown.begin, "</": shown.end, "": shown.text}
    for kind, token in _tokens(page):
        what[kind](token)
    lines = "".join(shown.parts).split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")
