"""Read files of text as lines of UTF-8: decompressed, and from whatever encoding they are in."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ctxflow.rows.columns import IN_BATCH, Words
from ctxflow.rows.source import MAX_ROW_BYTES, RowError

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 14
# Byte order marks; those that begin with another's come first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_GZIP = b"\x1f\x8b"
_UNREADABLE = (EOFError, zlib.error, gzip.BadGzipFile)


def opened(path: Path) -> BinaryIO:
    """Open a file to read, as bytes.

    :raises ValueError: if it cannot be read, saying why.
    """
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"the input {path} cannot be read: {error.strerror}") from None


def file_identity(paths: Iterable[Path]) -> str:
    """Return a digest of files' sizes and of samples spread over them: quick for any size, the same for a copy."""
    found = hashlib.blake2b(digest_size=12)
    for path in paths:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "big"))
            for n in range(_SAMPLES):
                file.seek(n * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def suffix_of(path: Path) -> str:
    """Return how a file's name ends, leaving out that it is compressed.

    >>> suffix_of(Path("claims.CSV.gz")), suffix_of(Path("claims"))
    ('.csv', '')
    """
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def check_encoding(name: str) -> str:
    """Return an encoding's usual name.

    :raises ValueError: if none of text is called so.

    >>> check_encoding("UTF16"), check_encoding("latin-1")
    ('utf-16', 'iso8859-1')
    """
    try:
        found = codecs.lookup(name)
        "".encode(found.name)
    except (LookupError, ValueError):
        raise ValueError(f"there is no encoding {name!r}: give one such as utf-8, utf-16, latin-1 or cp1252") from None
    return found.name


class _Readable(Protocol):
    def readline(self, limit: int, /) -> bytes: ...


class TextLines:
    """The lines of a file, as an iterator that goes on after it has raised `RowError` for too long a line.

    :ivar encoding: what the file is in; its bytes that are none of it are none of UTF-8 in the lines.
    """

    def __init__(self, file: _Readable, encoding: str = "utf-8", name: str = "the input") -> None:
        self.encoding = encoding.upper()
        self._file = file
        self._name = name

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            line = self._file.readline(MAX_ROW_BYTES + 1)
            if not line:
                raise StopIteration
            if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (part := self._file.readline(1 << 20)) and not part.endswith(b"\n"):
                    pass
                raise RowError(f"the line is longer than {MAX_ROW_BYTES >> 20} MiB")
        except _UNREADABLE as error:
            raise ValueError(f"{self._name} cannot be read on, as its compressed data are broken: {error}") from None
        return line


class _Transcoded:
    """Lines of another encoding, as UTF-8."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, errors="ctxflow-marked", newline="\n")
        self._begun = False

    def readline(self, limit: int, /) -> bytes:
        """Return the next line, or its beginning."""
        text = self._text.readline(limit)
        if not self._begun:
            self._begun, text = True, text.removeprefix("\ufeff")
        return text.encode("utf-8", "surrogateescape")


def _marked(error: UnicodeError) -> tuple[str, int]:
    """Put a byte that is none of UTF-8 where some are none of the encoding."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff", error.end


codecs.register_error("ctxflow-marked", _marked)


@contextlib.contextmanager
def open_lines(
    path: Path, encoding: str | None = None, name: str = "", words: Words = IN_BATCH
) -> Iterator[tuple[TextLines, BinaryIO]]:
    """Open a file for reading its lines, without its byte order mark; yields the lines, and the file itself.

    :param encoding: by default as its byte order mark tells, or UTF-8.
    :param name: what a person calls the file, by default its path; `words`, what to write to have it read otherwise.
    :raises ValueError: if it cannot be read, or is in another encoding.
    """
    called = name or f"the input {path}"
    with opened(path) as raw, contextlib.ExitStack() as stack:
        data: Any = raw
        if raw.read(2) == _GZIP:
            raw.seek(0)
            data = stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=raw)))
        raw.seek(0)
        head = _head(data, called)
        data.seek(0)
        mark, by_mark = next(((mark, name) for mark, name in _MARKS if head.startswith(mark)), (b"", None))
        chosen = check_encoding(encoding) if encoding is not None else by_mark or "utf-8"
        if by_mark is not None and not chosen.startswith(by_mark):
            raise ValueError(f"{called} begins with the byte order mark of {by_mark}: leave --encoding out")
        if chosen in ("utf-8", "utf-8-sig", "ascii"):
            if encoding is None and by_mark is None and _seems_utf16(head):
                kind = "utf-16-le" if head[1] == 0 else "utf-16-be"
                raise ValueError(f"{called} seems to be of UTF-16: {words.encoding.format(kind)}")
            data.seek(len(mark))
            yield TextLines(data, "utf-8", name or str(path)), raw
        else:
            yield TextLines(_Transcoded(data, chosen), chosen, name or str(path)), raw


def _head(data: Any, called: str) -> bytes:
    try:
        return bytes(data.read(4))
    except (*_UNREADABLE, OSError) as error:
        raise ValueError(f"{called} cannot be read, as its compressed data are broken: {error}") from None


def _seems_utf16(head: bytes) -> bool:
    zeros = tuple(byte == 0 for byte in head)
    return zeros in ((False, True, False, True), (True, False, True, False))


def head_of_file(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, decompressed.

    :raises ValueError: if it cannot be read.
    """
    with opened(path) as raw:
        head = raw.read(size)
        if not head.startswith(_GZIP):
            return head
        raw.seek(0)
        try:
            with gzip.GzipFile(fileobj=raw) as file:
                return file.read(size)
        except (*_UNREADABLE, OSError) as error:
            raise ValueError(f"the input {path} cannot be read, as its compressed data are broken: {error}") from None
