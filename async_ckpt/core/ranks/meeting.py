"""The messages of the ranks of one checkpointer to each other, through the store of their process group.

In: messages, by what they are about. Out: the messages of other ranks. Knows nothing of: saves, archives.

Before its first save rank 0 announces which ranks have equal structures. A rank waits for the messages of
others until a deadline, and a rank that stays silent until then counts as dead. A rank that must first wait for
something itself sends keep-alives.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Final

from ...errors import ClosedError, PeerFailedError
from ..host.waits import ENDS_THE_CALL, PEER_CALL_SECONDS, SIGN_SECONDS, Wait, wait_for
from ..runs.receipts import EMPTY, Table
from ..slicing.locator import Classes
from ..timing import TIMEKEEPER, monotonic
from .start import WorldStart, start_of
from .store import Messages, quietly
from .world import World, refuse_if_changed, world_of

# The seconds between two calls of `look_around`.
_LOOK_AROUND_SECONDS: Final = 2.0
NOT_ALONE: Final = "make the same calls on every rank; if this one alone saves, give its AsyncCheckpointer ranks=(0, 1)"
_NO_STRUCTURE: Final = "-"
# How many answers of rank 0 stay in the store: no rank is that many steps behind.
_KEPT: Final = 1000


def wait_for_rank_0(
    start: WorldStart, future: Future[Any], what: str, check: Callable[[], None], advice: str = ""
) -> None:
    """Wait for a future that depends on rank 0. Raises PeerFailedError if rank 0 is lost, or takes too long."""
    begin = monotonic()

    def goes_on() -> None:
        check()
        if monotonic() - begin > PEER_CALL_SECONDS:
            raise PeerFailedError(f"waited {PEER_CALL_SECONDS:.0f} s for {what}{advice}", rank=0)
        if why := start.lost_rank_0(begin):
            raise PeerFailedError(f"waited for {what}, but {why}; start all ranks again", rank=0)

    wait_for(future, None, goes_on)


class Talk:
    """The messages of one restore of all ranks. Used on the thread that restores."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.rank, self.size = meeting.world.rank, meeting.world.size
        self._meeting, self._prefix = meeting, _talk_prefix(number)
        self._signed = monotonic()  # when this rank last sent a keep-alive
        self._num_signs = 0  # the keep-alives that this rank has sent, or read

    def send(self, key: str, text: str) -> None:
        """Send a message to all ranks. A message with the same key is replaced."""
        self._meeting.messages().send(f"{self._prefix}/{key}", text)

    def receive(self, key: str, what: str) -> str:
        """The message of rank 0 with this key, once it is there. Raises PeerFailedError if that takes too long."""
        return self._meeting.receive([f"{self._prefix}/{key}"], what, "restore()", self._has_signed)[0]

    def receive_of_ranks(self, topic: str, what: str) -> list[str]:
        """On rank 0: the messages of the other ranks on a topic, in order. Raises PeerFailedError as `receive`."""
        return self._meeting.receive(self.keys_of_ranks(topic), what, "restore()", of_ranks=True)

    def keys_of_ranks(self, topic: str) -> list[str]:
        """The keys of these messages."""
        return [f"{self._prefix}/{topic}/{rank}" for rank in range(1, self.size)]

    def take_time(self) -> None:
        """On rank 0, now and then: send a keep-alive, so that the others wait longer for its next message."""
        if monotonic() - self._signed > SIGN_SECONDS:
            self._signed = monotonic()
            self.send(self._sign(), "")
            self._num_signs += 1

    def _has_signed(self) -> bool:
        """True if rank 0 has sent another keep-alive."""
        is_signed = self.rank != 0 and self._meeting.messages().sent(f"{self._prefix}/{self._sign()}") is not None
        self._num_signs += is_signed
        return is_signed

    def _sign(self) -> str:
        return f"takes time/{self._num_signs}"


class Meeting:
    """The messages of one checkpointer. Used on the thread that saves or restores.

    Args:
        given: the rank of this process and the number of ranks, as given by the user; None for those of the process
            group.
        store: for ranks without a process group, the store to which all of them are connected.
        topic: a topic that is the same on all ranks, however many meetings each has opened before. By default, all
            ranks must open theirs in the same order.
        advice: what to do if a rank does not come.
        is_of_paths: calls are matched by paths, which have no order, and not by steps.
    """

    def __init__(
        self,
        given: tuple[int, int] | None = None,
        *,
        store: Any = None,
        topic: str = "",
        advice: str = NOT_ALONE,
        is_of_paths: bool = False,
    ) -> None:
        self._topic, self.advice, self.is_of_paths = topic, advice, is_of_paths
        self._world: World | None = None
        if (given, store) != (None, None):
            self._world = world_of(given, store)
        self._opening = threading.Lock()
        self._messages: Messages | None = None
        self._token: str | None = None
        self._num_talks = 0  # the restores without a step for which the ranks have met, or were to
        self._num_tries = 0  # the calls of such a restore on this rank since then
        self._num_answers = 0  # the answers that rank 0 has sent, or this rank has read
        self.has_met = False
        self.table = EMPTY  # the table that holds before the first decision

    @property
    def world(self) -> World:
        """The world, fixed when it is first read: at the first save or restore."""
        if self._world is None:
            self._world = world_of()
        return self._world

    @property
    def start(self) -> WorldStart:
        """The start of these ranks. Exists only if there are several."""
        return start_of(self.world)

    def refuse_if_changed(self) -> None:
        """Raises ValueError if the process group has changed."""
        refuse_if_changed(self.world)

    @property
    def has_topic(self) -> bool:
        """True once messages have been sent to other ranks, or are about to be."""
        return bool(self._topic)

    @property
    def topic(self) -> str:
        """The topic of this meeting, unique in this start, and the same on all ranks."""
        start = self.start
        with self._opening:  # the thread that saves and the loop's thread may race for it
            if not self._topic:
                self._topic = str(next(start.openings))
        return self._topic

    def messages(self) -> Messages:
        """The messages of this meeting, on all ranks. Waits for rank 0 as `token` does."""
        if self._messages is None:
            self.token()
            self._messages = Messages(self.start.connection, f"{self.start.prefix}/{self.topic}")
        return self._messages

    # --- the first save -----------------------------------------------------------------------------------

    def token(self, where: str = "save()") -> str:
        """The name of this meeting: the same on all ranks, and different for every start. Waits for rank 0.

        Raises PeerFailedError.
        """
        if self._token is None:
            of_start = self.start.token
            self.wait_for_rank_0(of_start, "the first save or restore of rank 0", where)
            text = f"{of_start.result()}/{self.topic}"
            self._token = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return self._token

    def wait_for_rank_0(self, future: Future[Any], what: str, where: str = "save()") -> None:
        """Wait for a future that depends on rank 0. Raises PeerFailedError if rank 0 is lost, or takes too long."""
        wait = Wait(f"in {where}", ENDS_THE_CALL)
        wait_for_rank_0(
            self.start, future, what, lambda: wait.goes_on(lambda: f"{what}; {self.advice}"), f". {self.advised}"
        )

    @property
    def advised(self) -> str:
        """The advice as a sentence."""
        return f"{self.advice[0].upper()}{self.advice[1:]}"

    def meet(self, structure: str, where: str) -> Table:
        """Send the structure of this rank's state to rank 0, and return which ranks have equal structures."""
        self.has_met = True
        self.table = Table(self._classes(structure, where))
        return self.table

    def _classes(self, structure: str, where: str) -> Classes:
        rank, size, messages = self.world.rank, self.world.size, self.messages()
        messages.send(f"structure/{rank}", structure)
        if rank == 0:
            keys, what = [f"structure/{n}" for n in range(size)], "the first save of the other ranks"
            try:
                structures = self.receive(keys, what, where, of_ranks=True)
            except BaseException:  # the others need not wait: each writes everything that it holds
                quietly(lambda: messages.send("classes", json.dumps(EMPTY.packed())))
                raise
            classes: dict[str, list[int]] = {}
            for n, digest in enumerate(structures):
                if digest != _NO_STRUCTURE:  # that rank's save has raised
                    classes.setdefault(digest, []).append(n)
            messages.send("classes", json.dumps(Table(classes).packed()))
        (text,) = self.receive(["classes"], "the first save of all ranks", where)
        return Table.unpacked(json.loads(text)).classes

    def does_not_meet(self) -> None:
        """Tell rank 0 not to wait for this rank's structure: the call raised before it was known."""
        if self.has_met or self.world.is_one:
            return
        self.has_met, rank = True, self.world.rank
        self.start.send_later(f"{self.topic}/structure/{rank}", _NO_STRUCTURE)
        if rank == 0:
            self.start.send_later(f"{self.topic}/classes", json.dumps(EMPTY.packed()))

    # --- rank 0's answers ---------------------------------------------------------------------------------

    def answer_of_rank_0(self, what: str, step: int, ask: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return on all ranks what `ask` returns on rank 0, as JSON. All ranks ask once for each step.

        Rank 0's answers are a log. A rank looks there for the answer about its step, so it may have asked less often.
        Raises PeerFailedError on the other ranks if `ask` raises on rank 0, or rank 0 does not answer in time.
        """
        if self.world.rank:
            return self._answer_about(step, what)
        try:
            answer = ask()
        except BaseException as error:
            self.send_answer(step, error=in_words(error))
            raise
        self.send_answer(step, answer=answer)
        return answer

    def send_answer(self, step: int | None, **answer: Any) -> None:
        """On rank 0: send an `answer` or an `error` about a step, or with None, about what the others ask next."""
        number, self._num_answers = self._num_answers, self._num_answers + 1
        self.messages().send(f"answer/{number}", json.dumps({"about": step, **answer}))
        if number >= _KEPT:
            self.messages().begin_later("answer", number - _KEPT + 1)

    def _answer_about(self, step: int, what: str) -> Sequence[Any]:
        """On another rank: the next answer of rank 0 about `step`, or about a wrong argument."""
        number, about = self._num_answers, -1
        while True:
            if (text := self.messages().sent(f"answer/{number}")) is None:
                if (first := int(self.messages().sent("answer/first") or 0)) > number:
                    number = first
                    continue
                if about > step:  # rank 0 is at a later step, and the next calls will match again
                    raise PeerFailedError(f"{what}: rank 0 asks about step {about}, this rank about {step}", rank=0)
                passed = f"; its last one was about step {about}" if about >= 0 else ""
                (text,) = self.receive([f"answer/{number}"], f"rank 0's word on {what} for step {step}{passed}", what)
            answer: dict[str, Any] = json.loads(text)
            number += 1
            if answer["about"] in (step, None):
                self._num_answers = number
                if "error" in answer:
                    raise PeerFailedError(f"{what} has failed on rank 0: {answer['error']}", rank=0)
                return list(answer["answer"])
            about = answer["about"]

    # --- restores without a step --------------------------------------------------------------------------

    @contextmanager
    def restoring(self, *, talks: bool) -> Iterator[None]:
        """The block of a restore, which `talks` if it names no step. It fails on all ranks if it raises before that."""
        num_before = self._num_talks
        self._num_tries += talks
        try:
            yield
        except BaseException as error:
            if talks and self._num_talks == num_before and not (self._world or world_of()).is_one:
                with suppress(ClosedError):  # in a forked child
                    self._does_not_talk(error)
            raise

    def _does_not_talk(self, error: BaseException) -> None:
        rank, prefix = self.world.rank, _talk_prefix(self._num_talks)
        if rank == 0:
            self._send_met((0, _restore_failed(0, error)), None)
        elif not isinstance(error, PeerFailedError):
            here = json.dumps([self._num_tries, _restore_failed(rank, error)])
            self.start.send_later(f"{self.topic}/{prefix}/here/{rank}", here)
        elif self._messages is not None:  # this rank has restored alone
            self._messages.forget(f"{prefix}/here/{rank}")

    def talk(self) -> Talk | None:
        """Meet all ranks for a restore that names no step; None for a single rank. In the block of `restoring`.

        A rank counts its calls since it last met the others, and rank 0 names the call of each rank that it has met.
        So a call that a rank made alone, or that was interrupted, does not match a later one of all ranks. Raises
        PeerFailedError if the restore has failed on another rank, or a rank does not come.
        """
        if self.world.is_one:
            return None
        self.token("restore()")
        rank = self.world.rank
        while True:
            talk = Talk(self, self._num_talks)
            if rank == 0:
                self._gather(talk)
                return talk
            talk.send(f"here/{rank}", json.dumps([self._num_tries, ""]))
            failed, tries = json.loads(talk.receive("met", "rank 0 to restore"))
            is_met = tries is None or tries.get(str(rank), 1) == self._num_tries
            self._num_talks, self._num_tries = self._num_talks + 1, 0 if is_met else 1
            if is_met and failed:
                raise PeerFailedError(failed[1], rank=failed[0])
            if is_met:
                return talk

    def _gather(self, talk: Talk) -> None:
        """On rank 0: wait until all ranks are here, and tell them."""
        failed: tuple[int, str] | None = None
        texts: Sequence[str | None] = ()
        try:
            texts = talk.receive_of_ranks("here", "the other ranks to restore")
            for rank, (_, why) in enumerate(map(json.loads, texts), 1):
                if why:
                    raise PeerFailedError(why, rank=rank)
        except BaseException as error:
            failed = (error.rank, str(error)) if isinstance(error, PeerFailedError) else (0, _restore_failed(0, error))
            texts = texts or quietly(lambda: self.messages().each_sent(talk.keys_of_ranks("here"))) or ()
            raise
        finally:
            self._send_met(failed, {n: json.loads(text)[0] if text else 0 for n, text in enumerate(texts, 1)})

    def _send_met(self, failed: tuple[int, str] | None, tries: Mapping[int, int] | None) -> None:
        """On rank 0: tell the others why the restore has failed, and which of their calls it has met: 0 for none, None
        for any. Does not wait.
        """
        odd = None if tries is None else {rank: number for rank, number in tries.items() if number != 1}
        self.start.send_later(f"{self.topic}/{_talk_prefix(self._num_talks)}/met", json.dumps([failed, odd]))
        self._num_talks += 1

    # --- waiting ------------------------------------------------------------------------------------------

    def receive(
        self,
        keys: Sequence[str],
        what: str,
        where: str = "save()",
        takes_time: Callable[[], bool] = lambda: False,
        *,
        of_ranks: bool = False,
    ) -> list[str]:
        """The messages with these keys, once all of them are there: of rank 0, or with `of_ranks`, of the rank that
        each key ends with. `takes_time` returns True if rank 0 has just sent a keep-alive.
        """

        def ranks_of(keys: Sequence[str]) -> set[int]:
            return {int(key.rpartition("/")[2]) for key in keys} if of_ranks else {0}

        wait = Wait(f"in {where}", ENDS_THE_CALL)
        begin = looked = monotonic()

        def late() -> PeerFailedError:
            missing = sorted(ranks_of(self.messages().missing(keys)))
            who = f"; nothing was heard of ranks {', '.join(map(str, missing[:20]))}" if of_ranks else ""
            return PeerFailedError(
                f"waited {PEER_CALL_SECONDS:.0f} s for {what}{who}. {self.advised}", rank=missing[0] if missing else 0
            )

        def look_around() -> bool:
            goes_on = takes_time()
            lost = self.start.heartbeats.lost(ranks_of(keys) - {self.world.rank})
            missing = ranks_of(self.messages().missing(keys)) if lost else ()
            for rank, why in lost.items():
                if rank in missing:
                    raise PeerFailedError(
                        f"waited for {what}, but rank {rank} is lost: {why}; start all ranks again", rank=rank
                    )
            return goes_on

        def go_on(seconds: float) -> None:
            nonlocal begin, looked
            wait.goes_on(lambda: f"{what}; {self.advice}")
            if monotonic() - begin > PEER_CALL_SECONDS:
                raise late()
            if monotonic() - looked > _LOOK_AROUND_SECONDS:
                looked = monotonic()
                if look_around():
                    begin = looked
            TIMEKEEPER.sleep(seconds)

        return self.messages().receive(keys, go_on)


def _talk_prefix(number: int) -> str:
    """The prefix of the messages of the restore that follows `number` others."""
    return f"restore/{number}"


def _restore_failed(rank: int, error: BaseException) -> str:
    """The message to the other ranks that a restore has failed on this one."""
    return f"restore() has failed on rank {rank}: {in_words(error)}"


def in_words(error: BaseException) -> str:
    """The text of an error, as sent to other ranks."""
    return f"{type(error).__name__}: {error}"[:2000]
