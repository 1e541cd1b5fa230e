"""What may happen to a request: refused, not answered, cut, carried out without an answer, or the end of the process that sent it.

In: the number of a request. Out: a proxy that does it to this request, to its repetitions, or to all from there on.
Knows nothing of: what is saved.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from async_ckpt.testing import FaultyProxy
from async_ckpt.testing.requests import ProxiedRequest, Request, ScriptedCut, error_xml

_PIECE_BYTES: Final = 100  # of a body that is cut
_IN_A_ROW: Final = 3
_SLOW_SECONDS: Final = 0.1


class AttackingProxy(FaultyProxy):
    """A proxy that may also end the client, and may tell it when to come back."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.victim: int | None = None
        """The process that sends the requests, once it is known."""

    def busy(self, *, times: int | None = None, **match: Any) -> Any:
        async def act(exchange: ProxiedRequest) -> bool:
            if not exchange.waits_to_send:
                await exchange.consume()
            return await exchange.reply(503, error_xml("SlowDown", exchange.request), {"Retry-After": "1"})

        return self._add("busy", act, times, match)  # type: ignore[arg-type]

    def kill_before(self, *, times: int | None = None, **match: Any) -> Any:
        """The client ends when it has sent the head of the request, which is not passed on."""

        async def act(_: ProxiedRequest) -> bool:
            await self._kill()
            raise ScriptedCut

        return self._add("kill before", act, times, match)  # type: ignore[arg-type]

    def kill_after(self, *, times: int | None = None, **match: Any) -> Any:
        """The client ends when the server has carried out the request."""

        async def act(exchange: ProxiedRequest) -> bool:
            try:
                return await exchange.forward(lose_response=True)
            finally:
                await self._kill()

        return self._add("kill after", act, times, match)  # type: ignore[arg-type]

    async def _kill(self) -> None:
        while self.victim is None:
            await asyncio.sleep(0.001)
        os.kill(self.victim, signal.SIGKILL)

    @property
    def is_quiet(self) -> bool:
        """Whether no client is connected."""
        return not self._connections


class Asked(NamedTuple):
    """A request, as far as it decides which faults fit it."""

    call: str
    is_conditional: bool
    is_archive: bool
    num_bytes: int

    @classmethod
    def of(cls, request: Request) -> Asked:
        is_conditional = bool(request.headers.keys() & {"if-match", "if-none-match"})
        return cls(request.kind, is_conditional, ".tar" in request.target, request.num_bytes or 0)

    @property
    def kind(self) -> str:
        """Its name at a place."""
        return self.call + " if" * self.is_conditional + " tar" * self.is_archive


class Nth:
    """Which requests a fault strikes: the n-th of a kind and its repetitions, or all from there on. On the proxy's thread."""

    def __init__(self, kind: str, number: int, *, for_ever: bool = False) -> None:
        self._kind, self._number, self._for_ever = kind, number, for_ever
        self._count = 0
        self.struck: Request | None = None

    def __call__(self, request: Request) -> bool:
        if self.struck is not None:
            return self._for_ever or (request.method, request.target) == (self.struck.method, self.struck.target)
        self._count += Asked.of(request).kind == self._kind
        if self._count < self._number:
            return False
        self.struck = request
        return True


def _any(_: Asked) -> bool:
    return True


def _conditional(asked: Asked) -> bool:
    return asked.is_conditional and asked.call == "put_object"


def _has_answer(asked: Asked) -> bool:
    return asked.call in ("get_object", "list_objects", "list_multipart_uploads", "create_multipart_upload")


def _has_body(asked: Asked) -> bool:
    return asked.num_bytes > _PIECE_BYTES


def _sends_an_archive(asked: Asked) -> bool:
    return asked.is_archive and asked.call in ("put_object", "complete_multipart_upload")


def _is_no_deletion(asked: Asked) -> bool:
    """Of a deletion, 404 says that it is done."""
    return not asked.call.startswith("delete")


class Fault(NamedTuple):
    """What happens to a request, to which requests, and how often."""

    strike: Callable[..., Any]
    fits: Callable[[Asked], bool] = _any
    times: int | None = 1
    is_survived: bool = True
    """Nothing may fail by it."""
    kills: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    """Of the client, beside the usual ones."""


def _answer(code: str, status: int | None = None) -> Callable[..., Any]:
    return lambda proxy, **match: proxy.answer(code, status=status, **match)


def _cut_before(proxy: FaultyProxy, **match: Any) -> Any:
    return proxy.cut_request(0, **match)


# obstore itself tries a part ten times, with waits that nothing shortens.
_GIVES_UP: Final = {"retry_config": {"max_retries": 0}, "deadline_seconds": 30.0}

FAULTS: Final[Mapping[str, Fault]] = {
    "500": Fault(_answer("InternalError")),
    "503": Fault(_answer("SlowDown")),
    "503, Retry-After": Fault(AttackingProxy.busy),
    "reset before": Fault(_cut_before),
    "body cut": Fault(lambda proxy, **match: proxy.cut_request(_PIECE_BYTES, **match), _has_body),
    "answer lost": Fault(FaultyProxy.lose_response),
    "answer cut": Fault(lambda proxy, **match: proxy.cut_response(10, **match), _has_answer),
    "no answer": Fault(FaultyProxy.black_hole, options={"client_options": {"timeout": "1s"}}),
    "slow": Fault(lambda proxy, **match: proxy.delay(_SLOW_SECONDS, **match)),
    "409": Fault(_answer("ConditionalRequestConflict", 409), _conditional),
    "412, false": Fault(_answer("PreconditionFailed"), _conditional, is_survived=False),
    "condition ignored": Fault(FaultyProxy.ignore_conditions, _conditional),
    "archive lost": Fault(FaultyProxy.lose, _sends_an_archive),
    "401": Fault(_answer("AccessDenied", 401), is_survived=False),
    "403": Fault(_answer("AccessDenied"), is_survived=False),
    "404": Fault(_answer("NoSuchKey"), _is_no_deletion, is_survived=False),
    "500, thrice": Fault(_answer("InternalError"), times=_IN_A_ROW),
    "answer lost, thrice": Fault(FaultyProxy.lose_response, times=_IN_A_ROW),
    "503, for ever": Fault(_answer("SlowDown"), times=None, is_survived=False, options=_GIVES_UP),
    "403, for ever": Fault(_answer("AccessDenied"), times=None, is_survived=False, options=_GIVES_UP),
    "away, for ever": Fault(_cut_before, times=None, is_survived=False, options=_GIVES_UP),
    "SIGKILL before": Fault(AttackingProxy.kill_before, is_survived=False, kills=True),
    "SIGKILL after": Fault(AttackingProxy.kill_after, is_survived=False, kills=True),
}


def strike(proxy: AttackingProxy, fault: Fault, kind: str, number: int) -> Nth:
    """From now on the `number`-th request of this kind meets this."""
    nth = Nth(kind, number, for_ever=fault.times is None)
    fault.strike(proxy, where=nth, times=fault.times)
    return nth
