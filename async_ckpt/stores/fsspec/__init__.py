"""Storages through fsspec: S3 by s3fs, and any other filesystem.

`store.py` is the storage. Its objects are in a bucket of s3fs (`bucket.py`), or in any other filesystem
(`file_tree.py`); `info.py` is what these two have in common. `sinks.py` writes archives to either. `setup.py` makes the
filesystems, one for each process. `refusals.py` has advice on errors.
"""
