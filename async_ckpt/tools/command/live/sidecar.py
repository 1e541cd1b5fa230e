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
from pathlib import Path
from typing import Any, Final

from .... import Place
from ....weights.following.follower import Sidecar
from ....weights.following.health import Event
from ....weights.following.rollout_engines import VLLM, Engine, Post, Program, SGLang, engine_of
from ....weights.publishing.subscriber import Subscriber
from ..screen import USAGE, Answer, escaped, print_json

# The variable with the key that the engine asks for: arguments can be seen by all users of the machine.
_KEY: Final = "ASYNC_CKPT_ENGINE_KEY"


def engine_by(
    sglang: str | None,
    vllm: str | None,
    exec_: str | None,
    post: str | None,
    *,
    abort_requests: bool,
    answer_seconds: float,
) -> Engine:
    """The engine that the options choose. Raises Answer for options that do not go together, and ValueError."""
    given = [("--sglang", sglang), ("--vllm", vllm), ("--exec", exec_), ("--post", post)]
    chosen = [flag for flag, value in given if value is not None]
    if len(chosen) > 1:
        raise Answer(f"{' and '.join(chosen)}: a sidecar serves one engine; run one sidecar for each", USAGE)
    if abort_requests and not (sglang or vllm):
        raise Answer("--abort-requests is for --sglang and --vllm", USAGE)
    limit: dict[str, Any] = {"answer_seconds": answer_seconds}
    web = {**limit, "key": os.environ.get(_KEY) or None}
    if sglang is not None:
        return SGLang(sglang, abort_requests=abort_requests, **web)
    if vllm is not None:
        return VLLM(vllm, abort_requests=abort_requests, **web)
    if post is not None:
        return Post(post, **web)
    return engine_of(None if exec_ is None else Program(exec_, **limit))


def show(
    root: Place,
    into: str,
    engine: Engine,
    base: Path | None,
    status: Path | None,
    *,
    once: bool,
    poll_seconds: float,
    patience_seconds: float,
    as_json: bool,
) -> None:
    """Follow until a signal, and print each event as a line, or as a document in a line.

    Raises KeyboardInterrupt after Ctrl-C, Answer for a wrong call, and as `follow` does.
    """
    if not into:
        raise Answer("--into is missing: name a local folder for the versions", USAGE)
    with heard_signals() as signals, Subscriber(root, base=base) as subscriber:
        sidecar = Sidecar(
            subscriber,
            into,
            engine,
            _say_json if as_json else _say,
            status=status,
            poll_seconds=poll_seconds,
            patience_seconds=patience_seconds,
            stop=lambda: bool(signals),
        )
        sidecar.run(once=once)
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
