"""The archive as bytes: pure code, no torch, no file, no clock.

- `layout.py` plans an archive, with `index.py` as its first member and `digests.py` as its last.
- `tar.py`: headers of members; `safetensors.py`: the bytes in them.
- `tarball.py` plans a tar of existing files.
- Of compressed archives: `zstd.py` has the seek table of `x.tar.zst`; `blocks.py` a tar of blocks, as places keep it.
"""
