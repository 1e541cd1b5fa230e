"""Stores: object stores by obstore, and whatever fsspec reaches.

In: places. Out: storages. Knows nothing of: what is stored.
"""
