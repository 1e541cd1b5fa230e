"""Storages through fsspec: S3 through s3fs, and any other filesystem.

`store.py` is the storage. Its objects are in a bucket of s3fs (`s3fs_bucket.py`), or in any other filesystem
(`file_tree.py`). `sinks.py` writes archives to both. `setup.py` makes the filesystems, one for each process.
`error_advice.py` has advice on errors.
"""
