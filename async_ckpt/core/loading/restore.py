"""Restoring in place: live objects are filled without a second copy of the state.

In: live objects and open archives. Out: the objects with their saved values. Knows nothing of: files, steps.

Everything is compared first: before the first byte is written, one error lists all missing and unexpected names and all
wrong shapes and dtypes. Then tensors are filled, and finally other values are set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from ...errors import CorruptCheckpointError, StateMismatchError
from ..host.pool import SegmentPool
from ..spec import with_article
from ..state.generators import is_generator
from ..state.names import Select, selector
from ..state.plain import is_frozen, is_record, method_of
from ..state.wrappers import StateDictCache
from ..timing import Spans
from .archives.contents import Contents, Part, found_in
from .broadcast import Item, Share, Sharing
from .fill import Wanted, fill, planned
from .live.containers import is_array, is_buffer, is_list, is_mapping, take_actions, with_left_out
from .live.match import Match
from .load import Verify, check_lent, check_select

_ToFill: TypeAlias = tuple[Contents, Sequence[Wanted]]


class RestoreOptions(NamedTuple):
    """The options of `AsyncCheckpointer.restore` for the comparison and the reading."""

    select: Select = None
    strict: bool | None = None
    """False ignores names that only one side has; True also refuses data in a different order."""
    trust: bool = False
    verify: Verify = True
    types: Iterable[type] = ()
    goes_back: bool = False
    """True if the training has saved or restored before: names that the checkpoint lacks are then newer than it."""

    @property
    def compares_names(self) -> bool:
        return self.strict is not False


def restore_state(
    parts: Sequence[Part],
    live: Any,
    options: RestoreOptions,
    *,
    pool: SegmentPool | None = None,
    sharing: Sharing | None = None,
    state_dicts: StateDictCache | None = None,
    spans: Spans | None = None,
) -> Share | None:
    """Fill live objects from archives: the first has the step's own groups, the others have borrowed groups.

    Top-level entries of the archives that `live` lacks are ignored. `verify="first"` reads everything twice, to find
    damage before anything is overwritten. Buffers are taken from `pool` as far as it can spare them. With `sharing`,
    this rank reads only its part of the tensors that the ranks of the group share, and returns the work that remains.
    With `strict=False`, missing and unexpected names are ignored if at least one name is on both sides; shapes and
    dtypes must still match. A data loader whose order differs from the saved order causes a warning, or an error with
    `strict=True`. `spans` receives the spans "plan", "read" and "fill".

    Raises StateMismatchError before anything is written, and CorruptCheckpointError, with `partly_overwritten` if
    something was written.
    """
    spans = spans or Spans()
    begin = spans.clock()
    wanted, actions = _plan_of(parts, live, options, state_dicts or StateDictCache())
    share = None
    if sharing is not None:
        wanted, shared = _apart(wanted)
        share = Share(shared, actions)
        wanted += [(item.archive, [item.wanted]) for item in sharing.own(shared)]
    for archive, items in wanted:
        archive.need((item.number, item.box) for item in items)
    plan = planned(wanted)
    spans.add("plan", begin)
    if options.verify == "first":
        fill(plan, copy=False, pool=pool)
    try:
        with spans.span("read"):
            fill(plan, pool=pool)
        with spans.span("fill"):
            take_actions(actions if share is None else ())
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error} - and the live state is partly overwritten by now: restore another step before training on",
            path=error.path,
            partly_overwritten=True,
        ) from error
    return share


def _plan_of(
    parts: Sequence[Part], live: Any, options: RestoreOptions, state_dicts: StateDictCache
) -> tuple[list[_ToFill], list[Callable[[], None]]]:
    """The memory to fill from each archive, and the actions to take afterwards. Overwrites nothing.

    Raises StateMismatchError, and KeyError if nothing was selected.
    """
    _check_root(live)
    shares = list(_shares(parts, live))
    check_lent([part for part, _ in shares], options.select)
    check_select(parts, options.select)
    matches = found_in(shares, lambda one: (_match(*one, live, state_dicts, options), one[1]))
    nothing_fits = not any(match.fits for match, _ in matches)
    for match, _ in matches:
        try:
            archive = match.archive
            match.differences.raise_any(
                archive.path,
                archive.names(),
                names=options.compares_names or nothing_fits,
                order=options.strict is True,
            )
        except StateMismatchError:
            archive.check_headers()  # if the index is damaged, raises CorruptCheckpointError instead
            raise
    for match, _ in matches:
        match.differences.warn_of_order(match.archive.path)
    actions = [action for match, _ in matches for action in match.actions]
    actions += [functools.partial(_update, live, share) for _, share in matches if share is not live]
    return [(match.archive, [*match.wanted.values()]) for match, _ in matches], actions


def _match(part: Part, share: Any, live: Any, state_dicts: StateDictCache, options: RestoreOptions) -> Match:
    """Match live objects with one archive, or with the archives of several ranks.

    If an entry has no counterpart in the open archives, archives that together have all names are opened, and the match
    is repeated. Raises KeyError if nothing in the archives was selected.
    """
    archive = part.archive
    while True:
        saved, stored = archive.tree(select=options.select, types=options.types, groups=part.groups)
        if not part.keeps_empty:
            saved = with_left_out(share, saved, state_dicts.of)
        match = Match(
            archive,
            archive.objects(stored, trust=options.trust),
            selector(options.select),
            state_dicts,
            live,
            goes_back=options.goes_back and options.compares_names,
        )
        try:
            match.visit(share, saved, ())
        except RecursionError as error:
            raise archive.nested_too_deeply() from error
        if match.differences.are_none or not archive.learn_names():
            return match


def _apart(wanted: Sequence[_ToFill]) -> tuple[list[_ToFill], list[Item]]:
    """The tensors of each archive that each rank has separately, and the tensors that the ranks of a group share."""
    own: list[_ToFill] = []
    shared: list[Item] = []
    for number, (archive, items) in enumerate(wanted):
        own.append((archive, [item for item in items if archive.is_of_each(item.number)]))
        others = (item for item in items if not archive.is_of_each(item.number))
        shared += [Item(f"{number}/{archive.index.tensors[one.number].dotted}", archive, one) for one in others]
    return own, shared


def _shares(parts: Sequence[Part], live: Any) -> Iterator[tuple[Part, Any]]:
    """Each archive with the live objects that it fills."""
    if len(parts) == 1:
        yield parts[0], live
        return
    if not is_mapping(live):
        raise TypeError(
            "this step has borrowed groups from an earlier one; restore them into a dict of groups, not "
            f"{with_article(type(live).__qualname__)}"
        )
    borrowed = {group for part in parts[1:] for group in part.groups or ()}
    yield parts[0], {key: live[key] for key in list(live) if key not in borrowed}
    for part in parts[1:]:
        share = {key: live[key] for key in part.groups or () if key in live}
        if share:
            yield part._replace(groups=frozenset(share)), share
        elif not len(live):  # an empty dict receives everything that was saved
            yield part, share


def _update(live: Any, share: dict[Any, Any]) -> None:
    """Put the entries of a share into the live mapping, whose class may refuse `update`."""
    for key, value in share.items():
        if key not in live or live[key] is not value:
            live[key] = value


def _check_root(live: Any) -> None:
    fillable = (
        isinstance(live, torch.Tensor | MutableSet)
        or any(is_kind(live) for is_kind in (is_mapping, is_list, is_buffer, is_array, is_generator))
        or method_of(live, "load_state_dict") is not None
        or (is_record(live) and not is_frozen(live))
    )
    if not fillable:
        raise TypeError(
            f"restore fills objects in place and cannot fill {with_article(type(live).__qualname__)}; "
            "give it a dict, a module, an optimizer or a tensor, or use load()"
        )
