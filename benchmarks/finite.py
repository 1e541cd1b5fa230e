"""The cost of the check of `NonFinite`, compared with the digests of the same blocks, which every save makes.

In: a setting. Out: figures by name. Knows nothing of: marks.
"""

from __future__ import annotations

from functools import partial
from time import thread_time
from typing import Final

import torch

from async_ckpt import NonFinite
from async_ckpt.core.format import digests
from async_ckpt.core.format.layout import TensorPlan, lay_out
from async_ckpt.core.saving.finite import FiniteChecks
from async_ckpt.core.spec import BLOCK_BYTES, TensorSpec

from .figures import Saves, costs_of
from .setting import Setting, side_by_side
from .table import Figure
from .workloads import tensors

_DTYPES: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def finite(setting: Setting) -> dict[str, Figure]:
    return {f"finite_{name}": _checks(setting, name) for name in _DTYPES} | _saves(setting)


def _checks(setting: Setting, name: str) -> Figure:
    dtype = getattr(torch, name)
    shape = (setting.state_bytes // dtype.itemsize,)
    layout = lay_out(TensorPlan([TensorSpec(("w",), name, shape)]), skeleton="{}", objects=None, step=0, mtime=0)
    data = memoryview(bytearray(layout.file_bytes))  # zeros, which take as long as other numbers
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]

    def seconds(*, checks: bool) -> float:
        check = FiniteChecks(NonFinite()).of(layout) if checks else None
        begin = thread_time()
        for number, block in enumerate(blocks):
            if check is not None:
                check.note(number, block)
            digests.block_digest(block)
        return 1e3 * (thread_time() - begin)

    seconds(checks=True)  # touches the memory
    return Figure(
        f"processor time of check and digests of {len(data) / 1e9:.2g} GB of {name}",
        "ms",
        "the digests alone",
        None,
        side_by_side(setting.kept_rounds, partial(seconds, checks=True), partial(seconds, checks=False)),
    )


def _saves(setting: Setting) -> dict[str, Figure]:
    state = {"model": tensors(setting.state_bytes // 2), "optimizer": tensors(setting.state_bytes // 2)}
    checked = Saves(setting.folder / "checked", state, check=NonFinite())
    plain = Saves(setting.folder / "plain", state)
    what = f"a checked save of {setting.state_bytes / 1e9:.2g} GB"
    return costs_of(setting.kept_rounds, what, "finite", checked, plain, "without the check")


MEASURES: Final = {"finite": finite}
