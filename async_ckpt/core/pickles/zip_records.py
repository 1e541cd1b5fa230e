"""The records of torch.save's zip files, as zipfile reads them.

In: the list of records. Out: whether they have checksums. Knows nothing of: what is in them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable


def ignore_missing_checksums(infos: Iterable[zipfile.ZipInfo]) -> bool:
    """Have zipfile compare no checksums in what torch has saved under `set_crc32_options(False)`: there, all of them
    are 0. Returns whether that is so.
    """
    filled = [info for info in infos if info.file_size]
    if not filled or any(info.CRC for info in filled):
        return False
    for info in filled:
        del info.CRC
    return True
