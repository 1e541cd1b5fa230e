"""Versions in host memory, which processes of the same host and user read before they are at the root.

- `offer.py`: the version that a rank's `Publisher` lends; `borrow.py`: the version that a `Subscriber` borrows.
- `fd_passing.py`: passes the descriptors of the memory to other processes.
"""
