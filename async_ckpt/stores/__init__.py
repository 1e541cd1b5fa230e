"""Stores: object stores by obstore (`s3/`), and whatever fsspec reaches (`fsspec/`).

In: places. Out: storages. Knows nothing of: what is stored.

For both, `conditions.py` has conditional puts, `retry.py` calls that are tried again, `watched_calls.py` foreign calls
that may never return, and `proven/` finds out what a store can do.
"""
