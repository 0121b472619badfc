"""Stands for NVIDIA's nvidia-smi on a host, since its GPUs have no driver: it answers queries for what is in a table.

It knows `--query-gpu=FIELD,...` with `--format=csv[,noheader][,nounits]`, and `--id=` or `-i` with one GPU's index,
UUID or PCI address. It refuses everything else as the real one refuses what that does not know: with its messages,
which are written to standard output, and its exit status.
"""

from __future__ import annotations

import sys
from pathlib import Path

TABLE = Path("/run/testbed/cards")
"""A line of fields' names, and one for each GPU with their values, separated by commas (gpus.py)."""

UNITS = {"memory.total": "MiB"}
HELP = "Please run 'nvidia-smi -h' for help.\n"
INVALID, NOT_FOUND = 2, 6


def answer(words: list[str], table: str) -> tuple[str, int]:
    """What nvidia-smi writes when it is started with these words, and its exit status.

    >>> answer(["--query-gpu=name,memory.total", "--format=csv,noheader"], "name, memory.total\\nNVIDIA A10, 24576\\n")
    ('NVIDIA A10, 24576 MiB\\n', 0)
    """
    options: dict[str, str] = {}
    left = list(words)
    while left:
        name, _, value = (word := left.pop(0)).partition("=")
        if name not in ("--query-gpu", "--format", "--id", "-i"):
            return f"ERROR: Option {word} is not recognized. {HELP}", INVALID
        if name == "-i":
            name, value = "--id", left.pop(0) if left else ""
        if not value:
            return f"ERROR: Option {word} is missing its value. {HELP}", INVALID
        options[name] = value
    if "--query-gpu" not in options:
        return f"Invalid combination of input arguments. {HELP}", INVALID
    if "--format" not in options:
        return f'"--format=" switch is missing. {HELP}', INVALID
    form = set(options["--format"].split(","))
    if "csv" not in form or form - {"csv", "noheader", "nounits"}:
        return f"Invalid combination of input arguments. {HELP}", INVALID
    known, *rows = [line.split(", ") for line in table.splitlines()]
    fields = [field.strip() for field in options["--query-gpu"].split(",")]
    for field in fields:
        if field not in known:
            return f'Field "{field}" is not a valid field to query.\n\n', INVALID
    cards = [dict(zip(known, row, strict=True)) for row in rows]
    if (chosen := options.get("--id")) is not None:
        cards = [card for card in cards if chosen in (card["index"], card["uuid"], card["pci.bus_id"])]
    if not cards:
        return "No devices were found\n", NOT_FOUND
    units = {} if "nounits" in form else UNITS
    header = [[f"{field} [{units[field]}]" if field in units else field for field in fields]]
    values = [[f"{card[field]} {units.get(field, '')}".rstrip() for field in fields] for card in cards]
    lines = values if "noheader" in form else header + values
    return "".join(", ".join(line) + "\n" for line in lines), 0


def main() -> None:
    """Answer the command line."""
    text, status = answer(sys.argv[1:], TABLE.read_text(encoding="utf-8"))
    sys.stdout.write(text)
    sys.exit(status)
