"""Answers that a server gives, and that are not what their requests bind them to: dead letters, and no results."""

import csv
import json
import sys

import pytest
from batch_helpers import read_lines, write_lines

from ctxflow.batch import load_job
from ctxflow.batch.driver import run_job

pytest.importorskip("aiohttp")
pytest.importorskip("jsonschema")

PARROT = """
import json, socket, socketserver, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Parrot(BaseHTTPRequestHandler):
    def do_GET(self):
        self.give({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": body["messages"][-1]["content"]}
        said = None if said["content"] == "nonsense" else said
        self.give({"choices": [{"message": said, "finish_reason": "stop"}]})

    def give(self, data):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

class AtSocket(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        socketserver.TCPServer.server_bind(self)

    def get_request(self):
        connection, _ = self.socket.accept()
        return connection, ("", 0)

AtSocket(sys.argv[1], Parrot).serve_forever()
"""
SCHEMA = {"type": "object", "properties": {"price": {"type": "number", "maximum": 3}}, "required": ["price"]}


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_what_a_server_lets_pass_is_a_dead_letter(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parrot.py").write_text(PARROT)
    form = {"type": "json_schema", "json_schema": {"name": "price", "schema": SCHEMA}}
    answers = {"right": '{"price": 2.5}', "dear": '{"price": 12.5}', "no JSON": "price: 2", "none": "nonsense"}
    write_lines(
        tmp_path / "in.jsonl",
        [
            {
                "custom_id": name, "method": "POST", "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": text}], "response_format": form},
            }
            for name, text in answers.items()
        ],
    )  # fmt: skip
    command = f"{sys.executable} {tmp_path}/parrot.py {{socket}} {{model}}"
    job = load_job(None, input="in.jsonl", output=output, model="parrot", backend="server", server_command=command)
    outcome = run_job(job)
    assert (outcome.done, outcome.dead, outcome.exit_status) == (1, 3, 3)
    letters = {each["custom_id"]: each["error"]["message"] for each in read_lines(tmp_path / f"{output}.errors.jsonl")}
    assert letters["dear"].endswith("12.5 is greater than the maximum of 3 (at price)")
    assert letters["none"].startswith("the result cannot be written: ")
    assert letters["no JSON"].startswith("the answer is no JSON, to which the request binds it")


@pytest.mark.parametrize(("name", "output"), [("in.csv", "a.jsonl"), ("in.jsonl", "a.csv"), ("req.jsonl", "a.csv")])
def test_a_schema_binds_rows_of_any_form_and_its_properties_are_columns(tmp_path, monkeypatch, name, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parrot.py").write_text(PARROT)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    texts = ['{"price": 2.5, "more": 1}', '{"price": 12.5}']
    with open("in.csv", "w", newline="") as file:
        csv.writer(file).writerows([["messages"], *([text] for text in texts)])
    write_lines(tmp_path / "in.jsonl", [{"messages": text} for text in texts])
    write_lines(
        tmp_path / "req.jsonl",
        [
            {
                "custom_id": text[-6:], "method": "POST", "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": text}]},
            }
            for text in texts
        ],
    )  # fmt: skip
    command = f"{sys.executable} {tmp_path}/parrot.py {{socket}} {{model}}"
    task = {} if name == "req.jsonl" else {"task": "chat"}
    how = {"model": "parrot", "backend": "server", "server_command": command, "answer_schema": "schema.json", **task}
    outcome = run_job(load_job(None, input=name, output=output, **how))
    assert (outcome.done, outcome.dead) == (1, 1)
    (dead,) = read_lines(tmp_path / f"{output}.errors.jsonl")
    assert dead["error"]["message"].endswith("12.5 is greater than the maximum of 3 (at price)")
    if output.endswith("jsonl"):
        (row,) = read_lines(tmp_path / output)
    else:
        (row,) = csv.DictReader((tmp_path / output).read_text().splitlines())
    assert (str(row["row"]), str(row["price"]), row["text"]) == ("0", "2.5", texts[0])
    (tmp_path / "schema.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds the results of another job .*answer_schema was"):
        run_job(load_job(None, input=name, output=output, **how))


def test_a_request_to_responses_is_asked_as_a_chat_and_answered_in_its_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parrot.py").write_text(PARROT)
    form = {"format": {"type": "json_schema", "name": "price", "schema": SCHEMA}}
    bodies = {
        "right": {"input": '{"price": 2.5}', "text": form},
        "dear": {"input": '{"price": 12.5}', "text": form},
        "free": {"instructions": "Repeat.", "input": [{"role": "user", "content": "hello"}]},
        "kept": {"input": "hello", "previous_response_id": "resp_1"},
    }
    requests = [{"custom_id": name, "url": "/v1/responses", "body": body} for name, body in bodies.items()]
    write_lines(tmp_path / "in.jsonl", requests)
    command = f"{sys.executable} {tmp_path}/parrot.py {{socket}} {{model}}"
    how = {"input": "in.jsonl", "model": "parrot", "backend": "server", "server_command": command}
    outcome = run_job(load_job(None, output="out.jsonl", **how))
    assert (outcome.done, outcome.dead) == (2, 2)
    answers = {each["custom_id"]: each["response"]["body"] for each in read_lines(tmp_path / "out.jsonl")}
    texts = {name: body["output"][0]["content"][0]["text"] for name, body in answers.items()}
    assert texts == {"right": '{"price": 2.5}', "free": "hello"}
    assert {body["object"] for body in answers.values()} == {"response"}
    letters = {each["custom_id"]: each["error"]["message"] for each in read_lines(tmp_path / "out.jsonl.errors.jsonl")}
    assert "12.5 is greater than the maximum" in letters["dear"] and "is kept by OpenAI alone" in letters["kept"]
    assert run_job(load_job(None, output="out.jsonl", **how)).already
