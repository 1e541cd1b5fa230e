"""Saved archives, opened for a reader, and checked as far as their bytes are read.

- `find` goes from a path or a run to a committed step, and hands its archives to a reader. It has the face open files
  of other programs.
- `contents` is the common base: a tree of names, and the places of each tensor's bytes.
- `archive` is one file of this library.
- `copies` reads one archive block by block from several places.
- `step_archives` opens the archives of several ranks as they are needed; `merged_archives` presents them as one file.
"""
