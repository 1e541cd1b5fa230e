"""The archive as bytes: pure code, no torch, no file, no clock.

- `layout.py` plans an archive; `index.py` is its first member, `digests.py` its last.
- `tar.py`: headers of members; `safetensors.py`: headers of the safetensors files in them.
- `tar_of_files.py` plans a tar of existing files.
- Compressed archives: `zstd.py` is the seek table of `x.tar.zst`; `blocks.py` a tar of blocks, at compressing places.
"""
