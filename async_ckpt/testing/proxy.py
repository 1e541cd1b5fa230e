"""A proxy between a client and an S3 server that passes everything through, except for scripted faults.

In: the endpoint of a server, and faults. Out: an endpoint, all requests, and how often each fault struck.
Knows nothing of: storages, signatures. It forwards bytes unchanged, the Host header included.

One thread runs one asyncio loop. A client's connection is one task, and each request has its own connection to the
server, so that a cut hits exactly one request. Bodies are streamed: only a few pieces are held in each direction. A cut
is a reset on both sides: bytes that were forwarded before it may still arrive.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self, Unpack
from urllib.parse import urlsplit

from .requests import (
    PATIENCE_SECONDS,
    PIECE_BYTES,
    STATUS,
    Act,
    Fault,
    HttpConnection,
    ProxiedRequest,
    Request,
    RequestMatch,
    ScriptedCut,
    completed_xml,
    error_xml,
    parse,
    predicate,
)

_ROUNDS: Final = 8  # rounds of the loop; asyncio needs four from accepting a connection to starting its task


class FaultyProxy:
    r"""A proxy for the server at `upstream`, within a `with` block. Thread-safe.

    Give the client `proxy.endpoint`, as in `{**server.options, "endpoint": proxy.endpoint}`. Signatures stay
    valid: they cover the Host header, which is forwarded unchanged.

    A fault strikes the first `times` requests that match (see `RequestMatch`), or all of them. A request meets at most
    one fault: the earliest added fault that matches and is not used up. Faults may be added and cleared at any time,
    from any thread; once the call has returned, the next request follows the new script.

        with moto_server() as server, FaultyProxy(server.endpoint) as proxy:
            fault = proxy.cut_request(100_000, target=r"partNumber=7\b", times=5)
            ...
            assert fault.hits == 5
            assert proxy.count(kind="complete_multipart_upload") == 1
    """

    def __init__(self, upstream: str) -> None:
        url = urlsplit(upstream)
        self._upstream = (url.hostname or "127.0.0.1", url.port or 80)
        # A port that is bound without listening refuses connections, and no other process can take it.
        self._bound = _bind(0)
        self._port = int(self._bound.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy")
        # All fields below are changed only by that thread.
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._requests: list[Request] = []
        self._faults: list[Fault] = []
        self._refusals: list[Fault] = []
        self._error: BaseException | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in the order of their arrival."""
        return list(self._requests)

    def count(self, **match: Unpack[RequestMatch]) -> int:
        """The number of matching requests so far."""
        return sum(map(predicate(match), self.requests))

    def clear(self) -> None:
        """Clear every fault."""
        for fault in [*self._faults, *self._refusals]:
            fault.clear()

    # --- the faults -------------------------------------------------------------------------------------------

    def refuse(self) -> Fault:
        """Reset all connections and refuse new ones, as if the server were down, until the fault is cleared."""
        fault = Fault("refuse", ProxiedRequest.forward, None, {}, self._remove_fault)
        self._in_loop(self._set_refusals([*self._refusals, fault]))
        return fault

    def cut_request(self, after_bytes: int = 0, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Cut the connection after `after_bytes` of the request's body were forwarded; at 0, before the request.

        Strikes only requests with longer bodies.
        """
        act, matches = partial(ProxiedRequest.forward, cut_request=after_bytes), predicate(match)

        def is_long(request: Request) -> bool:
            return matches(request) and (
                not after_bytes or request.num_bytes is None or request.num_bytes > after_bytes
            )

        return self._add(f"cut request after {after_bytes} bytes", act, times, {"where": is_long})

    def cut_response(self, after_bytes: int = 0, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Cut the connection after the head of the response and `after_bytes` of its body. Shorter responses pass."""
        act = partial(ProxiedRequest.forward, cut_response=after_bytes)
        return self._add(f"cut response after {after_bytes} bytes", act, times, match)

    def lose_response(self, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Let the server handle the request, and cut the connection instead of forwarding the response."""
        return self._add("lose response", partial(ProxiedRequest.forward, lose_response=True), times, match)

    def throttle(self, bytes_per_second: float, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Forward the bodies of a request and its response at this rate, for each request."""
        act = partial(ProxiedRequest.forward, bytes_per_second=bytes_per_second)
        return self._add(f"throttle to {bytes_per_second} bytes/s", act, times, match)

    def delay(self, seconds: float | None, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Forward the request after `seconds`, or when the fault is cleared; with None, only when it is cleared.

        Until then, bytes of the body are only held in the system's buffers.
        """

        async def act(exchange: ProxiedRequest) -> bool:
            with suppress(TimeoutError):
                await asyncio.wait_for(fault._cleared.wait(), seconds)
            return await exchange.forward()

        name = "hold" if seconds is None else f"delay {seconds} s"
        fault = Fault(name, act, times, match, self._remove_fault)  # assigned before a request can meet it
        return self._begin(fault)

    def black_hole(self, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Read the request, forward nothing, and never answer, even when the fault is cleared."""

        async def act(exchange: ProxiedRequest) -> bool:
            await exchange.consume()
            await exchange.client.wait_closed()
            return False

        return self._add("black hole", act, times, match)

    def answer(
        self, code: str, *, status: int | None = None, times: int | None = None, **match: Unpack[RequestMatch]
    ) -> Fault:
        """Answer with this error of S3 ("SlowDown", "AccessDenied", …), and forward nothing."""
        number = STATUS[code] if status is None else status

        async def act(exchange: ProxiedRequest) -> bool:
            if not exchange.waits_to_send:
                await exchange.consume()
            return await exchange.reply(number, error_xml(code, exchange.request))

        return self._add(f"answer {number} {code}", act, times, match)

    def ignore_conditions(self, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Remove If-Match and If-None-Match from the request, so that the store seems to ignore conditions."""

        async def act(exchange: ProxiedRequest) -> bool:
            exchange.remove_headers("if-match", "if-none-match")
            return await exchange.forward()

        return self._add("ignore conditions", act, times, match)

    def lose(self, *, times: int | None = None, **match: Unpack[RequestMatch]) -> Fault:
        """Acknowledge the request as a success, and forward nothing, so that the object is lost.

        For put_object, upload_part, complete_multipart_upload and delete_object.
        """

        async def act(exchange: ProxiedRequest) -> bool:
            etag = await exchange.consume()
            if exchange.request.kind == "complete_multipart_upload":
                return await exchange.reply(200, completed_xml(exchange.request, f'"{etag}-1"'))
            if exchange.request.method == "DELETE":
                return await exchange.reply(204)
            return await exchange.reply(200, headers={"ETag": f'"{etag}"'})

        return self._add("lose", act, times, match)

    def _remove_fault(self, fault: Fault) -> None:
        self._in_loop(self._remove(fault))

    def _add(self, name: str, act: Act, times: int | None, match: RequestMatch) -> Fault:
        return self._begin(Fault(name, act, times, match, self._remove_fault))

    def _begin(self, fault: Fault) -> Fault:
        async def add() -> None:
            self._faults.append(fault)

        self._in_loop(add())
        return fault

    async def _remove(self, fault: Fault) -> None:
        fault._cleared.set()
        self._faults = [other for other in self._faults if other is not fault]
        if fault in self._refusals:
            await self._set_refusals([other for other in self._refusals if other is not fault])

    async def _set_refusals(self, refusals: list[Fault]) -> None:
        self._refusals = refusals
        if refusals and self._listener is not None:
            await self._stop_listening()
        elif not refusals and self._listener is None:
            await self._listen()

    # --- start and end ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._in_loop(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()
        self._bound.close()
        if error is None and self._error is not None:
            raise self._error  # a predicate of the script has raised

    def __repr__(self) -> str:
        host, port = self._upstream
        return f"<FaultyProxy {self.endpoint} -> {host}:{port}, {len(self._requests)} requests, {self._faults}>"

    def _in_loop(self, call: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the proxy's thread, and wait for it."""
        if not self._thread.is_alive():
            call.close()
            raise RuntimeError("a FaultyProxy works within its `with` block")
        asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE_SECONDS)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, sock=_bind(self._port), limit=PIECE_BYTES)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            # Connections accepted by now must not meet a closed server: asyncio would forget their sockets.
            for sock in self._listener.sockets:
                self._loop.remove_reader(sock.fileno())
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            self._listener.close()
            self._listener = None
        for _ in range(_ROUNDS):  # accepted connections become tasks, and tasks close their connections
            tasks = list(self._connections)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client, request after request, until one side closes it."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        client = HttpConnection(reader, writer)
        try:
            while await self._exchange(client):
                pass
            client.close()
        except (ScriptedCut, OSError, EOFError, asyncio.CancelledError):
            # Ended by the script, the client, the server, or the end of the proxy.
            client.reset()
        except BaseException as error:
            client.reset()
            self._error = self._error or error
        finally:
            self._connections.discard(task)

    async def _exchange(self, client: HttpConnection) -> bool:
        head = await client.head()
        if head is None:
            return False
        (method, target, *_), headers = parse(head)
        request = Request(method, target, headers)
        self._requests.append(request)
        fault = next((fault for fault in self._faults if fault._strikes(request)), None)
        exchange = ProxiedRequest(self._upstream, client, request, head)
        return await (fault._act(exchange) if fault else exchange.forward())


def _bind(port: int) -> socket.socket:
    # With all three arguments, or asyncio would not set TCP_NODELAY.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if hasattr(socket, "SO_REUSEPORT"):  # one socket holds the port, and another listens
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock
