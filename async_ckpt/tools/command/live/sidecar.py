"""The word `follow`: a sidecar from the command line, which SIGTERM ends between two versions.

In: a root, a folder, an engine by its option. Out: a line for each event on stdout, for errors on stderr.
Knows nothing of: pulls, requests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .... import Place
from ....weights.following.follower import Timing, new_sidecar
from ....weights.following.health import Event
from ....weights.following.rollout_engines import VLLM, Engine, Post, Program, SGLang, engine_of
from ....weights.publishing.subscriber import Subscriber
from ..screen import USAGE, Answer, escaped, print_json

# The variable with the key that the engine asks for: arguments can be seen by all users of the machine.
_KEY: Final = "ASYNC_CKPT_ENGINE_KEY"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The options that choose an engine; at most one of the first four is given."""

    sglang: str | None
    vllm: str | None
    exec_: str | None
    post: str | None
    abort_requests: bool
    answer_seconds: float

    def engine(self) -> Engine | None:
        """The engine, or None. Raises Answer for options that do not go together, and ValueError."""
        given = [("--sglang", self.sglang), ("--vllm", self.vllm), ("--exec", self.exec_), ("--post", self.post)]
        chosen = [flag for flag, value in given if value is not None]
        if len(chosen) > 1:
            raise Answer(f"{' and '.join(chosen)}: a sidecar serves one engine; run one sidecar for each", USAGE)
        if self.abort_requests and not (self.sglang or self.vllm):
            raise Answer("--abort-requests is for --sglang and --vllm", USAGE)
        limit: dict[str, Any] = {"answer_seconds": self.answer_seconds}
        web = {**limit, "key": os.environ.get(_KEY) or None}
        if self.sglang is not None:
            return SGLang(self.sglang, abort_requests=self.abort_requests, **web)
        if self.vllm is not None:
            return VLLM(self.vllm, abort_requests=self.abort_requests, **web)
        if self.post is not None:
            return Post(self.post, **web)
        return None if self.exec_ is None else Program(self.exec_, **limit)


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """The options of `follow` that are not about the engine."""

    root: Place
    into: str
    base: Path | None
    once: bool
    status: Path | None
    poll_seconds: float
    patience_seconds: float


def show(request: FollowRequest, choice: EngineChoice, *, as_json: bool) -> None:
    """Follow until a signal, and print each event as a line, or as a document in a line.

    Raises KeyboardInterrupt after Ctrl-C, Answer for a wrong call, and as `follow` does.
    """
    if not request.into:
        raise Answer("--into is missing: name a local folder for the versions", USAGE)
    engine = engine_of(choice.engine())
    status = None if request.status is None else request.status.absolute()
    with heard_signals() as signals, Subscriber(request.root, base=request.base) as subscriber:
        timing = Timing(request.poll_seconds, request.patience_seconds, lambda: bool(signals))
        say = _say_json if as_json else _say
        new_sidecar(subscriber, request.into, engine, timing, status, say).run(once=request.once)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt


def _say(event: Event) -> None:
    print(escaped(event.line), file=sys.stderr if event.is_bad else sys.stdout, flush=True)


def _say_json(event: Event) -> None:
    print_json(event.kind, event.facts, in_line=True)


@contextmanager
def heard_signals() -> Iterator[list[int]]:
    """The SIGTERM or Ctrl-C that has come within the block. A second one has its usual effect."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
