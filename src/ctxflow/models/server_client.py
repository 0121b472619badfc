"""How a server is spoken to: HTTP over connections that are kept, each seen to lead to our own server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import json
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp

_QUICK: Any = None
with contextlib.suppress(ImportError):  # It is quicker, and no more.
    _QUICK = importlib.import_module("orjson")

UNREACHED = (aiohttp.ClientError, OSError, EOFError, TimeoutError)
"""What a request raises that got no answer."""

_KEPT_SECONDS = 3.0  # Less than servers keep idle connections: some close them after 5 s.


class Stranger(Exception):
    """Somebody else than our server listens where it should."""


class Answer(NamedTuple):
    """What a server answered."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return the body's data; None if it is no JSON."""
        try:
            return _QUICK.loads(self.body) if _QUICK else json.loads(self.body)
        except ValueError:
            pass
        try:
            return json.loads(self.body)  # Which takes NaN, too.
        except ValueError:
            return None


def dump(body: Mapping[str, Any]) -> bytes:
    """Return JSON data as bytes.

    :raises TypeError: for what is no JSON data.
    """
    return bytes(_QUICK.dumps(body)) if _QUICK else json.dumps(body).encode()


class Client:
    """Connections to one server, as many as there are requests.

    :param path: its UNIX socket, or None; then `port`.
    :param check: called with no argument when a new connection to the port is made, before anything is sent on it:
        whether it leads to our server.
    """

    def __init__(self, path: str | None, port: int, key: str, check: Callable[[], bool]) -> None:
        kept: dict[str, Any] = {"limit": 0, "keepalive_timeout": _KEPT_SECONDS}
        connector = _AtSocket(path, check=lambda: True, **kept) if path else _AtPort(check=check, **kept)
        self._base = "http://localhost" if path else f"http://127.0.0.1:{port}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            connector=connector, headers={**headers, "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 20,
            trust_env=False, auto_decompress=False, skip_auto_headers=("Accept-Encoding",),
        )  # fmt: skip

    async def post(self, path: str, body: bytes) -> Answer:
        """Send a request, and return what was answered; cancelled, it closes its connection.

        :raises Stranger: if somebody else listens there.
        """
        async with self._session.post(self._base + path, data=body, allow_redirects=False) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def get(self, path: str, seconds: float) -> Answer:
        """Ask for something that is answered at once."""
        limit = aiohttp.ClientTimeout(total=seconds)
        async with self._session.get(self._base + path, timeout=limit, allow_redirects=False) as response:
            return Answer(response.status, await response.read(), response.headers)

    async def aclose(self) -> None:
        """Close all connections; requests in flight end with one of `UNREACHED`."""
        await self._session.close()


class _Checked:
    """What connectors add: a look at each new connection, before anything is sent on it."""

    def __init__(self, *arguments: Any, check: Callable[[], bool], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._check = check
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        pause = 0.005
        while True:
            connection = await super().connect(*arguments, **options)  # type: ignore[misc] # Of a connector.
            protocol = connection.protocol
            if protocol in self._seen:
                return connection
            if _is_connected(connection.transport):
                # What it reached had been listening before; if that is still ours, it was.
                if self._check():
                    self._seen.add(protocol)
                    return connection
                connection.close()
                raise Stranger
            connection.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)


def _is_connected(transport: Any) -> bool:
    """Return whether asyncio says rightly that it is: at a UNIX socket with a full backlog it does not wait."""
    try:
        transport.get_extra_info("socket").getpeername()
    except OSError as error:
        return error.errno != errno.ENOTCONN
    return True


class _AtSocket(_Checked, aiohttp.UnixConnector):  # type: ignore[misc] # Which mypy does not look into.
    pass


class _AtPort(_Checked, aiohttp.TCPConnector):  # type: ignore[misc]
    pass
