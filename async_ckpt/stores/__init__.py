"""Stores: object stores through obstore (`s3/`), and all filesystems of fsspec (`fsspec/`).

In: places. Out: storages. Knows nothing of: what is stored.

`proven/` finds out what a store can do, and `conditions.py` makes conditional puts, for both. `retry.py` repeats calls,
and `watched_calls.py` makes foreign calls that may never return.
"""
