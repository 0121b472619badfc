"""Short ways to write inputs and read outputs."""

import json


def write_lines(path, records):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
