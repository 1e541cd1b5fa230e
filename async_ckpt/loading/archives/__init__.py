"""Archives that were saved, opened for a reader, and checked as far as their bytes are looked at.

- `find` goes from a path or a run to a committed step, and hands its archives to whoever reads.
- `archive` is one file of ours; `foreign` and `dcp_folder` are what other programs write; `virtual_files` are made of pieces.
- `step_archives` are those of several ranks, opened as far as they are needed; `merged_archives` has them as one file.
- `contents` is what they have in common: a tree of names, and where the bytes of each tensor lie.
"""
