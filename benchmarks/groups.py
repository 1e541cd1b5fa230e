"""The cost of `unchanged_groups`: digests of groups, compared with digests of blocks, which every save makes.

In: a setting. Out: figures by name. Knows nothing of: the use of the digests.

A group adds the digests of the two blocks that it shares with others, so the cost depends on the number of groups. The
library has no switch for it: a save without it is a save of an archive whose layout names no groups.
"""

from __future__ import annotations

from time import thread_time
from typing import Final
from unittest.mock import patch

from async_ckpt import SaveReport
from async_ckpt.core.format import digests
from async_ckpt.core.format.layout import Layout
from async_ckpt.core.saving.block_digests import GroupDigests
from async_ckpt.core.spec import BLOCK_BYTES, PAGE_BYTES, Extent

from .figures import Saves, costs_of
from .setting import Setting, side_by_side
from .table import Figure
from .workloads import tensors

_NUM_GROUPS: Final = (2, 10, 100)


def groups(setting: Setting) -> dict[str, Figure]:
    return {f"group_digests_{number}": _digests(setting, number) for number in _NUM_GROUPS} | _saves(setting)


def _digests(setting: Setting, number: int) -> Figure:
    data = memoryview(bytearray(setting.state_bytes))
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    share = len(data) // number
    extents = {str(i): [Extent(i * share + PAGE_BYTES, share - 2 * PAGE_BYTES)] for i in range(number)}

    def seconds(of: dict[str, list[Extent]]) -> float:
        begin = thread_time()
        found, of_blocks = GroupDigests(of), bytearray()
        for i, block in enumerate(blocks):
            found.note(i, block)
            of_blocks += digests.block_digest(block)
        found.result(of_blocks)
        return 1e3 * (thread_time() - begin)

    seconds({})  # touches the memory
    return Figure(
        f"processor time of all digests of {len(data) / 1e9:.2g} GB, {number} groups among them",
        "ms",
        "those of the blocks alone",
        None,
        side_by_side(setting.kept_rounds, lambda: seconds(extents), lambda: seconds({})),
    )


class _Ungrouped(Saves):
    """Saves without digests of groups."""

    def run(self) -> SaveReport:
        with patch.object(Layout, "groups", {}):
            return super().run()


def _saves(setting: Setting) -> dict[str, Figure]:
    count = setting.state_bytes // 2
    state = {"model": tensors(count), "optimizer": tensors(count)}
    grouped, plain = Saves(setting.folder / "grouped", state), _Ungrouped(setting.folder / "plain", state)
    what = f"a save of {2 * count / 1e9:.2g} GB in two groups"
    return costs_of(setting.kept_rounds, what, "group", grouped, plain, "without their digests")


MEASURES: Final = {"groups": groups}
