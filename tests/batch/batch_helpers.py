"""Short ways to write inputs and read outputs."""

import contextlib
import json

from ctxflow.batch import ledger
from ctxflow.batch.display import LineDisplay
from ctxflow.ownership import AppendFile


class Notes(LineDisplay):
    """Keeps what is said, and the progress that is shown."""

    def __init__(self):
        super().__init__()
        self.said = []
        self.shown = []

    def _print(self, text):
        self.said.append(text)

    def progress(self, now):
        self.shown.append(now)
        super().progress(now)


def write_lines(path, records):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def as_of_an_earlier_ctxflow(journal_path):
    """Make a journal what version 0.1 would have written: without rows' digests, with fewer facts."""
    with contextlib.closing(AppendFile(journal_path)) as file:
        found = list(ledger.frames(file))
    written = bytearray(ledger.EARLIER)
    for frame in found:
        kind, body = frame.kind, frame.body
        if kind == ledger.DIGESTED:
            kind, body = ledger.ROWS, body[: 16 * (frame.done + frame.dead)]
        elif kind == ledger.FACTS:
            facts = json.loads(body)
            facts.pop("made_of", None)
            facts.get("settings", {}).pop("too_long", None)
            for name in ("max_errors", "too_long", "delimiter", "encoding"):  # Which it did not know.
                facts.get("settings", {}).pop(name, None)
            if "input" in facts:
                facts["input"] = facts["input"]["digest"]
            body = json.dumps(facts).encode()
        written += ledger.packed(kind, body, frame.done, frame.dead, frame.sizes)
    journal_path.write_bytes(written)
