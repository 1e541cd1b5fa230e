"""Checkpoints of other programs, read like archives, and compared with their own checksums.

- `tensor_files.py`: safetensors files, shards with an index, and folders of extracted archives, which
  `virtual_files.py` joins to one file again.
- `dcp_folder.py`: folders of torch.distributed.checkpoint, with `dcp_metadata.py` and `dcp_checksums.py`.
- `foreign_files.py`: the kinds of single files, by their first bytes.
- `tar_stream.py`: the members of any tar, read by `read_ahead.py`.
- `foreign_checks.py`: the verification of a file or folder.

`loading.archives.find` imports this room when it meets the first such checkpoint.
"""

from __future__ import annotations

from .foreign_checks import compare_dcp as compare_dcp
from .foreign_checks import compare_foreign as compare_foreign
from .tensor_files import opened as opened
from .tensor_files import parts_of_folder as parts_of_folder
