"""Saved archives, opened for a reader. The bytes that are read are verified.

- `find` locates the committed step of a path or a run, and passes its archives to a reader. The face opens files of
  other programs for it.
- `contents` is the common base: a tree of names, and the location of each tensor's bytes.
- `archive` is one file written by this library.
- `copies` reads one archive block by block from several places.
- `step_archives` opens the archives of several ranks as they are needed; `merged_archives` presents them as one file.
"""
