"""Messages of hosts as dicts: what a test says as `{"do": ...}`, and what it looks at as `{"is": ...}`, and a body."""

import dataclasses

from ctxflow.host import library_messages as lib
from ctxflow.host import messages as m
from ctxflow.host import messages as v
from ctxflow.host import wire

KINDS = {
    "load": lib.BuildContext,
    "function": lib.GivePart,
    "forget_functions": lib.ForgetParts,
    "call": lib.RunCall,
    "stage": m.StageFiles,
    "preload": m.PreloadModules,
    "unload": m.EndLibrary,
    "park": lib.ParkContext,
    "wake": lib.WakeContext,
    "interrupt": m.InterruptCall,
    "drain": m.DrainCalls,
    "overdue": m.EndOverdue,
    "ping": m.Ping,
    "release": m.LeaveWorker,
    "hello": v.AskFacts,
    "listen": v.Listen,
    "seed": v.SeedFile,
    "fetch": v.FetchFile,
    "take": v.TakeKept,
    "link": v.LinkFile,
    "forget": v.ForgetFile,
    "environment": v.OpenEnvironment,
    "send_state": v.SendState,
    "take_state": v.TakeState,
}
REPORTS = {
    m.HostStarted: "hello",
    m.FilesStaged: "staged",
    m.StagingFailed: "failed",
    lib.ContextBuilt: "ready",
    lib.BuildFailed: "failed",
    lib.ContextAsleep: "asleep",
    lib.ContextAwake: "awake",
    lib.ParkRaised: "failed",
    m.LibraryEnded: "unloaded",
    m.LibraryDied: "died",
    lib.PartFinished: "part",
    lib.CallFinished: "finished",
    lib.CallRaised: "raised",
    m.WorkerStuck: "stuck",
    m.Pong: "pong",
    m.NoticeGiven: "notice",
    v.WorkerFacts: "hello",
    v.FileCached: "fetched",
    v.FileDone: "done",
    v.FileFailed: "failed",
    v.CallRefused: "refused",
    v.ModulesLacking: "lacks",
}
NAMES = {lib.GivePart: {"function": "name"}, lib.ForgetParts: {"functions": "names"}}


def instruction(head, body=b""):
    """The message that a dict stands for."""
    kind = KINDS[head["do"]]
    names = NAMES.get(kind, {})
    fields = {names.get(name, name): value for name, value in head.items() if name != "do"}
    if "body" in {field.name for field in dataclasses.fields(kind)}:
        fields["body"] = body
    if kind is v.FetchFile and not fields:
        fields = dict.fromkeys(("digest", "content", "source", "kind", "input"))
    return kind(**fields)


def frame(head, body=b""):
    """A message as a frame; of what is none, the dict as it is."""
    try:
        return wire.pack(instruction(head, body))
    except (KeyError, TypeError):
        return wire.frame(head, body)


def report(message):
    """What a test looks at: what is there of a report, and its body."""
    head = {"is": REPORTS[type(message)]}
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if field.name == "trouble":
            head["failure"] = value._asdict()
        elif field.name != "body" and (value is not None or type(message) is v.WorkerFacts):
            head[field.name] = value
    return head, message.body


def reports(frames):
    """The reports of some frames."""
    return [report(v.FROM_WORKER.open(head, body)) for head, body in wire.unframe(frames)]
