"""The subcommand `follow`: a sidecar from the command line, which SIGTERM ends between two versions.

In: a root, a folder, an engine by its option. Out: a line for each event on stdout, for errors on stderr. Knows nothing
of: pulls, requests.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .... import Place
from ....weights.following.follower import Sidecar
from ....weights.following.health import Event
from ....weights.following.rollout_engines import VLLM, Engine, Post, Program, SGLang, engine_of
from ....weights.publishing.subscriber import Subscriber
from ..output import USAGE, Answer, escaped, print_json

# The environment variable with the key of the engine. All users of the machine could see an argument.
_KEY: Final = "ASYNC_CKPT_ENGINE_KEY"


def show(
    root: Place,
    *,
    into: str,
    sglang: str | None,
    vllm: str | None,
    exec_: str | None,
    post: str | None,
    abort_requests: bool,
    answer_within: float,
    poll: float,
    patience: float,
    status: Path | None,
    base: Path | None,
    once: bool,
    as_json: bool,
) -> None:
    """Follow until a signal, and print each event as a line of text or JSON.

    Raises KeyboardInterrupt after Ctrl-C, and the errors of `async_ckpt.follow`.
    """
    given = {"--sglang": sglang, "--vllm": vllm, "--exec": exec_, "--post": post}
    chosen = {flag: value for flag, value in given.items() if value is not None}
    engine = _engine_by(chosen, abort_requests=abort_requests, answer_seconds=answer_within)
    if not into:
        raise Answer("--into is missing: name a local folder for the versions", USAGE)
    with collected_signals() as signals, Subscriber(root, base=base) as subscriber:
        sidecar = Sidecar(
            subscriber,
            into,
            engine,
            _print_event_json if as_json else _print_event,
            status=status,
            poll_seconds=poll,
            patience_seconds=patience,
            stop=lambda: bool(signals),
        )
        sidecar.run(once=once)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt


def _engine_by(chosen: Mapping[str, str], *, abort_requests: bool, answer_seconds: float) -> Engine:
    """The engine of the option that was given."""
    if len(chosen) > 1:
        raise Answer(f"{' and '.join(chosen)}: a sidecar serves one engine; run one sidecar for each", USAGE)
    if abort_requests and not {"--sglang", "--vllm"} & chosen.keys():
        raise Answer("--abort-requests is for --sglang and --vllm", USAGE)
    key = os.environ.get(_KEY) or None
    for flag, value in chosen.items():
        if flag == "--exec":
            return engine_of(Program(value, answer_seconds=answer_seconds))
        if flag == "--post":
            return Post(value, answer_seconds=answer_seconds, key=key)
        kind = SGLang if flag == "--sglang" else VLLM
        return kind(value, abort_requests=abort_requests, answer_seconds=answer_seconds, key=key)
    return engine_of(None)


def _print_event(event: Event) -> None:
    print(escaped(event.line), file=sys.stderr if event.is_bad else sys.stdout, flush=True)


def _print_event_json(event: Event) -> None:
    print_json(event.kind, event.facts, in_line=True)


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C within the block. A second signal has its usual effect."""
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
