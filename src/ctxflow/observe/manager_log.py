"""Read who sent which file to whom, when, and how fast, from the debug log of TaskVine's manager in one pass.

The lines (TaskVine 7.15.9), each after a local time in hundredths of a second:

- `tx to HOST (ADDRESS): put NAME LEVEL SIZE`: the manager sends a file, and waits until it is sent;
- `tx to HOST (ADDRESS): infile NAME AS FLAGS`, `outfile ...`: a call takes or makes it; AS says which file of the run;
- `HOST (ADDRESS) received 100.00 MB in 0.83s`, or `... failed to send ...`: the put is over;
- `tx to HOST (ADDRESS): puturl workerip://IP:PORT/NAME NAME LEVEL SIZE MODE ID`: a worker is told to fetch a file;
- `rx from HOST (ADDRESS): cache-update NAME TYPE LEVEL SIZE MTIME MICROSECONDS START ID`: it has it, in so many us
  since that Unix time; the ID is X if nobody asked for the file, so that a call of its own wrote it;
- `rx from HOST (ADDRESS): cache-invalid NAME LENGTH ID`: it could not have it; the reason follows as a line;
- `rx from HOST (ADDRESS): transfer-port PORT`: where the worker itself listens;
- `worker HOST (ADDRESS) removed`: it is gone.
"""

from __future__ import annotations

import calendar
import dataclasses
import re
from collections.abc import Iterable
from urllib.parse import unquote

from ctxflow.observe.transfers import MANAGER, ContextFile, Peer, StagingNotes, Transfer, Transfers, began

_UNFINISHED = "it was not over when the log ended"
_MOST_PUTS = 64  # Sends to a worker that may still turn out to be of a file of the run.
_QUARTER = 900  # Seconds: the difference of any local time from UTC is a multiple of a quarter of an hour.
_LINE = re.compile(
    rb"(?P<time>\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d\d) [^:]*: (?:worker |tx to |rx from )?"
    rb"(?P<host>[^ ]+) \((?P<address>[^)]+)\):? (?P<message>.*)"
)
# What every line worth reading holds one of.
_WORTH = re.compile(
    rb"\) (?:received|failed to send|removed|invalidated)|\): (?:put|infile |outfile |unlink |cache-|transfer-)"
)
_NAMED = re.compile(r"ctxflow-(?:in|out)-([\w.-]+)")


@dataclasses.dataclass
class _Sending:
    """A transfer that was asked for: stamps are local times, as seconds since 1970."""

    name: str
    sender: str
    size: int
    stamp: float
    transfer_id: str = ""


@dataclasses.dataclass
class _Worker:
    """A connection to the manager: what is on its way to it, and what it got and holds."""

    address: str
    pending: dict[str, _Sending] = dataclasses.field(default_factory=dict)
    put: _Sending | None = None
    puts: dict[str, tuple[_Sending, float, float]] = dataclasses.field(default_factory=dict)  # By name: start, end.
    holds: set[str] = dataclasses.field(default_factory=set)
    failed: Transfer | None = None


def read_transfers(lines: Iterable[bytes], staging: StagingNotes | None = None) -> Transfers:
    """Return the transfers that a manager's debug log records; `with_notes` adds those of which it knows nothing.

    Takes time in proportion to the log, and memory for workers and transfers. Torn lines, and lines of other kinds,
    are passed over. With staging notes, only the files that they name are reported, workers have their names, and
    times are on the run's clock; without any, all files, workers are addresses, and 0 is the log's first line.

    :param lines: of the file `vine-logs/debug`.
    """
    reader = _Reader(staging or StagingNotes())
    for line in lines:
        reader.take(line)
    return reader.result()


class _Reader:
    """Collect the transfers of a log, line by line."""

    def __init__(self, staging: StagingNotes) -> None:
        self._staging = staging
        self._names = dict(staging.names)  # Cache name -> digest.
        self._workers: dict[str, _Worker] = {}
        self._listens: dict[str, str] = {}  # "IP:PORT" where a worker serves its peers -> its address.
        self._found: list[Transfer] = []
        self._files: dict[str, ContextFile] = {}
        self._peers: dict[str, Peer] = {}
        self._known: dict[str, list[Peer]] = {}
        for peer in staging.peers.values():
            self._known.setdefault(peer.address, []).append(peer)
            if peer.listens:  # The log says that too, but is not written all the time.
                self._listens[peer.listens] = peer.address
        self._hosts: dict[str, str] = {}  # Address -> host.
        self._lines = 0
        self._first: float | None = None
        self._offset: float | None = None  # From local stamps to Unix time.
        self._minute, self._minute_stamp = b"", 0.0

    # --- lines

    def take(self, line: bytes) -> None:
        """Take a line of the log."""
        if self._lines < 2:
            self._begin(self._stamp(line[:22]))
        if _WORTH.search(line) is None:
            return
        parts = _LINE.match(line)
        stamp = self._stamp(parts["time"]) if parts else None
        if parts is None or stamp is None:
            return
        address = parts["address"].decode("utf-8", "replace")
        worker = self._workers.setdefault(address, _Worker(address))
        self._hosts[address] = parts["host"].decode("utf-8", "replace")
        self._message(worker, stamp, parts["message"].decode("utf-8", "replace"))

    def _begin(self, stamp: float | None) -> None:
        """Take the first lines: the very first may be in another time zone, since writing it makes TaskVine set TZ."""
        self._lines += 1
        if stamp is not None and (self._first is None or abs(stamp - self._first) >= _QUARTER):
            self._first = stamp

    def _message(self, worker: _Worker, stamp: float, message: str) -> None:
        match message.split():
            case ["puturl" | "puturl_now", url, name, _, size, _, ident, *_] if _whole(size):
                name = unquote(name)
                worker.pending[name] = _Sending(name, self._sender(unquote(url)), int(size), stamp, ident)
            case ["put", name, _, size] if _whole(size):
                worker.put = _Sending(unquote(name), MANAGER, int(size), stamp)
            case ["infile" | "outfile", name, alias, _]:
                self._named(worker, unquote(name), unquote(alias))
            case ["received", _, "MB", "in", seconds, *_] if worker.put is not None:
                self._put_over(worker, stamp, _seconds(seconds))
            case ["failed", "to", "send", *_] if worker.put is not None:
                self._failed(worker, worker.put, stamp, "the manager could not send it")
                worker.put = None
            case ["cache-update", name, _, _, size, _, micros, began, ident] if (
                _whole(size) and _whole(micros) and _whole(began)
            ):
                self._updated(worker, stamp, name, int(size), int(micros) / 1e6, int(began) / 1e6, ident)
            case ["cache-invalid", name, _, *_]:
                sending = worker.pending.pop(name, None)
                worker.failed = None
                if sending is not None:
                    self._failed(worker, sending, stamp, "the worker could not have it")
            case ["invalidated", name, "with", "error:", *_]:
                self._reason(worker, name, message)
            case ["unlink", name]:
                worker.holds.discard(self._digest(unquote(name)))
            case ["transfer-port" | "transfer-hostport", *where] if where:  # A port, after a host or not.
                self._listens[":".join([worker.address.rpartition(":")[0], *where][-2:])] = worker.address
            case ["removed"]:
                self._removed(worker, stamp)

    def _sender(self, url: str) -> str:
        scheme, _, rest = url.partition("://")
        if scheme not in ("worker", "workerip"):
            return f"{scheme}://{rest.partition('/')[0]}" if rest else url[:60]
        listens = rest.partition("/")[0]
        return self._listens.get(listens, listens)

    def _named(self, worker: _Worker, name: str, alias: str) -> None:
        """Take the name of a call's file, which also says what was sent for it just before."""
        found = _NAMED.fullmatch(alias)
        if found is None:
            return
        self._names[name] = found[1]
        if name in worker.puts:
            sending, start, end = worker.puts.pop(name)
            worker.holds.add(found[1])
            self._add(sending, worker, start, end)

    def _put_over(self, worker: _Worker, stamp: float, seconds: float) -> None:
        sending, worker.put = worker.put, None
        assert sending is not None
        if not self._told_of(sending.name):
            worker.puts[sending.name] = sending, stamp - seconds, stamp
            if len(worker.puts) > _MOST_PUTS:
                del worker.puts[next(iter(worker.puts))]
        else:
            worker.holds.add(self._digest(sending.name))
            self._add(sending, worker, stamp - seconds, stamp)

    def _updated(
        self, worker: _Worker, stamp: float, name: str, size: int, seconds: float, began: float, ident: str
    ) -> None:
        """Record that a worker has a file, which it was told to fetch, or which a call of its own wrote."""
        sending = worker.pending.pop(name, None)
        if sending is not None and sending.transfer_id == ident:
            self._offset = round((began + seconds - stamp) / _QUARTER) * _QUARTER
        if not self._told_of(name) or (sending is None and (ident != "X" or self._digest(name) in worker.holds)):
            return
        worker.holds.add(self._digest(name))
        if sending is not None:
            self._add(dataclasses.replace(sending, size=size), worker, stamp - seconds, stamp)
            return
        # If that call was sent a file of this size, it is the one that the manager's copy became.
        before = next((put for put in worker.puts.values() if put[0].size == size), None)
        if before is not None:
            self._add(dataclasses.replace(before[0], name=name), worker, before[1], before[2])
        else:
            self._add(_Sending(name, worker.address, size, stamp), worker, stamp - seconds, stamp, kind="made")

    def _failed(self, worker: _Worker, sending: _Sending, stamp: float, error: str) -> None:
        if self._told_of(sending.name):
            self._add(sending, worker, sending.stamp, stamp, error)
            worker.failed = self._found[-1]

    def _reason(self, worker: _Worker, name: str, message: str) -> None:
        """Take the line after a cache-invalid, which says why."""
        if worker.failed is not None and self._found and self._found[-1] is worker.failed:
            why = message.partition("with error:")[2].strip().rpartition(f"'{name}': ")[2]
            self._found[-1] = dataclasses.replace(worker.failed, error=why or worker.failed.error)
        worker.failed = None

    def _removed(self, worker: _Worker, stamp: float) -> None:
        for sending in [*worker.pending.values(), *([worker.put] if worker.put else [])]:
            self._failed(worker, sending, stamp, "the worker was lost")
        del self._workers[worker.address]  # One that comes back from the same address is a new one.

    # --- names and times

    def _told_of(self, name: str) -> bool:
        return name in self._names or (self._staging.origin is None and not self._staging.names)

    def _digest(self, name: str) -> str:
        return self._names.get(name, name)

    def _add(
        self,
        sending: _Sending,
        worker: _Worker,
        start: float | None,
        end: float | None,
        error: str = "",
        kind: str = "sent",
    ) -> None:
        """Record a transfer, for now in local stamps, by addresses."""
        digest, size = self._digest(sending.name), sending.size
        if digest not in self._files:
            self._files[digest] = self._staging.files.get(digest, ContextFile(digest, sending.name, size))
        stamps = sending.stamp, start, end
        self._found.append(Transfer(digest, sending.sender, worker.address, kind, *stamps, size, error))

    def _stamp(self, text: bytes) -> float | None:
        """Return a local time as seconds since 1970 as if it were UTC."""
        try:
            if text[:16] != self._minute:
                date = (int(text[:4]), int(text[5:7]), int(text[8:10]), int(text[11:13]), int(text[14:16]), 0)
                self._minute, self._minute_stamp = text[:16], float(calendar.timegm(date))
            return self._minute_stamp + float(text[17:22])
        except ValueError:
            return None

    def _zero(self) -> float:
        """Return the local stamp of the run's clock 0."""
        first = self._first or 0.0
        if self._staging.origin is None:
            return first
        offset = self._offset
        if offset is None:  # No worker reported a Unix time; but the manager starts with the run.
            offset = round((self._staging.origin - first) / _QUARTER) * _QUARTER
        return self._staging.origin - offset

    def _peer(self, address: str, time: float) -> str:
        """Return the name of whoever had an address at a time; the manager, a URL and what is unknown keep theirs."""
        known = self._known.get(address, [])
        if not known and address not in self._hosts:
            return address
        there = [peer for peer in known if peer.lost is None or peer.lost >= time]
        peer = (there or known[-1:] or [Peer(address, self._hosts.get(address, ""), address)])[0]
        return self._peers.setdefault(peer.worker, peer).worker

    def result(self) -> Transfers:
        """Return what was found, on the run's clock and by the workers' names."""
        zero, staging = self._zero(), self._staging
        for worker in self._workers.values():
            for sending in worker.pending.values():
                if self._told_of(sending.name):
                    self._add(sending, worker, None, None, _UNFINISHED)
        found = []
        for local in self._found:
            asked, start, end = (None if at is None else at - zero for at in (local.asked, local.start, local.end))
            sender, receiver = self._peer(local.sender, asked or 0.0), self._peer(local.receiver, asked or 0.0)
            found.append(
                dataclasses.replace(local, sender=sender, receiver=receiver, asked=asked, start=start, end=end)
            )
        return Transfers(sorted(found, key=began), {**staging.files, **self._files}, {**staging.peers, **self._peers})


def _seconds(word: str) -> float:
    """Return the seconds of "0.83s"."""
    try:
        return max(0.0, float(word.rstrip("s")))
    except ValueError:
        return 0.0


def _whole(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 19
