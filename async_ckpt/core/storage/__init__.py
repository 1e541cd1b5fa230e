"""Places where archives, manifests and trackers are written, listed and read.

`interface.py` defines the promises of every storage; `place.py` and `url.py` find the storage for a path or URL.
`local.py` is the disk, on top of `disk.py` (system calls) and `locks.py` (temp files). `store_facts.py` is for the wing
`stores`. On top of any storage: `bulk.py` (many objects), `sequential.py` (front to back), `compressed.py` (zstd),
`pace.py` (bandwidth).
"""
