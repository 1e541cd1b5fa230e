"""The step that a run continues from: the newest step, or with several ranks the step that rank 0 names.

In: runs, and a function for a step's archives. Out: the step, and the function's result.
Knows nothing of: live objects.

Ranks must not start from different steps, even if they see or can read different steps. So if the user gives no step,
rank 0 names one, and no rank falls back to an older step on its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from ...errors import CorruptCheckpointError, NotCommittedError, PeerFailedError
from ..ranks.meeting import Talk, in_words, step_key
from ..runs.root import TRIES, overtaken_error
from ..runs.roots import Roots
from ..timing import TIMEKEEPER, monotonic
from .archives.contents import Part
from .archives.find import PassedOver, from_step
from .archives.step_archives import Readers

T = TypeVar("T")

# The time after which a rank must see a step that rank 0 sees: NFS hides a new step for up to a minute.
SEEN_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.2
_FINE: Final = "fine"
_CORRUPT: Final = "corrupt"


class SeeOwnSaves(Protocol):
    """A function that waits until the saves of this rank are decided, and calls `meanwhile` repeatedly."""

    def __call__(self, *, meanwhile: Callable[[], None] = ...) -> None: ...


def resume(
    roots: Roots,
    use: Callable[[Sequence[Part]], T],
    *,
    verify: bool,
    readers: Readers,
    talk: Talk | None,
    see_own_saves: SeeOwnSaves,
    fallback: bool,
    on_skip: Callable[[int, str], None],
    only_good: bool = False,
) -> tuple[int, T] | None:
    """The newest committed step that can be read and is not marked bad, and the result of `use` for it.

    Returns None if nothing is committed. With `only_good`, only steps that are marked good are tried. `on_skip`
    receives each skipped step. Each rank first waits for its own unfinished saves, rank 0 before it names a step.

    With `talk`, all ranks use the step that rank 0 names. A rank that finds the step corrupt raises. With `fallback`,
    rank 0 names an older step instead, and any other error of a rank is a PeerFailedError on the other ranks. Raises
    CorruptCheckpointError, NoGoodStepError, NotCommittedError, StorageUnavailableError, PeerFailedError.
    """
    if talk is None or talk.rank:
        see_own_saves()
    if talk is None:
        roots.check_naming()
    passed, num_gone = PassedOver(on_skip), 0

    def chosen(skipped: dict[int, str]) -> int | None:
        if talk is None:
            return roots.newest_sound(skipped, only_good=only_good)
        return _agreed_step(roots, talk, len(passed.corrupt), skipped, see_own_saves, only_good=only_good)

    while (step := passed.next(chosen)) is not None:
        try:
            result = from_step(roots, step, use, verify=verify, readers=readers)
        except CorruptCheckpointError as error:
            if talk is not None:
                if not fallback:
                    raise
                _is_fine_everywhere(talk, step, is_fine=False)
            passed.note(step, error)
            continue
        except BaseException as error:
            if talk is None and isinstance(error, NotCommittedError):  # the step was deleted while it was read
                num_gone += 1
                if num_gone < TRIES:
                    continue
                raise overtaken_error(", ".join(roots.names)) from error
            if talk is not None and fallback:  # the other ranks wait for this rank's answer
                _send_failure(talk, step, error)
            raise
        if talk is None or not fallback or _is_fine_everywhere(talk, step, is_fine=True):
            return step, result
        passed.note(step, CorruptCheckpointError(f"step {step} is corrupt as another rank reads it", path=repr(roots)))
    passed.raise_any(roots)
    return None


def _agreed_step(
    roots: Roots, talk: Talk, number: int, skipped: dict[int, str], see_own_saves: SeeOwnSaves, *, only_good: bool
) -> int | None:
    """The step, not in `skipped`, that rank 0 names, once this rank sees it. `skipped` gets steps excluded by marks."""
    key = step_key(number)
    if talk.rank == 0:
        try:
            see_own_saves(meanwhile=talk.take_time)
            newest = _newest_but(roots, skipped, only_good=only_good)
        except BaseException as error:
            talk.send(key, json.dumps({"error": in_words(error)}))
            raise
        talk.send(key, json.dumps({"found": newest, "skipped": [*skipped.items()]}))
        return newest[0] if newest else None
    text = talk.receive(key, "the step that rank 0 restores")
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise PeerFailedError(f"rank 0 could not say which step to restore: {answer['error']}", rank=0)
    skipped.update(answer["skipped"])
    if answer["found"] is None:
        return None
    step, attempt = answer["found"]
    _wait_until_seen(roots, int(step), str(attempt), talk.rank)
    return int(step)


def _newest_but(roots: Roots, skipped: dict[int, str], *, only_good: bool) -> tuple[int, str] | None:
    roots.check_naming()
    step = roots.newest_sound(skipped, only_good=only_good)
    if step is None:
        roots.refuse_if_left_out()
        return None
    manifest = next((manifest for run in roots.holding(step) if (manifest := run.committed(step))), None)
    return step, "" if manifest is None else manifest.attempt


def _wait_until_seen(roots: Roots, step: int, attempt: str, rank: int) -> None:
    deadline = monotonic() + SEEN_SECONDS
    while True:
        with suppress(NotCommittedError):
            if any(
                not attempt or (manifest is not None and attempt in (manifest.attempt, *manifest.replaces))
                for manifest in (run.committed(step) for run in roots.holding(step))
            ):
                return
        if monotonic() > deadline:
            raise PeerFailedError(
                f"{roots!r}: rank 0 restores step {step}, which rank {rank} does not see there; give a root that all "
                "ranks share",
                rank=0,
            )
        TIMEKEEPER.sleep(_LOOK_SECONDS)


def _is_fine_everywhere(talk: Talk, step: int, *, is_fine: bool) -> bool:
    """True if all ranks could read a step. Waits for all answers. Raises PeerFailedError if a rank has failed."""
    word = _FINE if is_fine else _CORRUPT
    if talk.rank:
        talk.send(f"{step}/{talk.rank}", word)
    else:
        words = [word, *talk.receive_of_ranks(str(step), "what the other ranks read")]
        failed = next((word for word in words if word not in (_FINE, _CORRUPT)), None)
        talk.send(f"{step}/all", failed or (_FINE if {*words} == {_FINE} else _CORRUPT))
    word = talk.receive(f"{step}/all", "what the other ranks read")
    if word not in (_FINE, _CORRUPT):
        failure = json.loads(word)
        raise PeerFailedError(
            f"rank {failure['rank']} could not restore step {step}: {failure['error']}", rank=failure["rank"]
        )
    return word == _FINE


def _send_failure(talk: Talk, step: int, error: BaseException) -> None:
    """Make all ranks fail, without waiting for them: an older step would not help, since the error is not damage."""
    word = json.dumps({"rank": talk.rank, "error": in_words(error)})
    talk.send(f"{step}/{talk.rank}", word)
    if talk.rank == 0:
        talk.send(f"{step}/all", word)
