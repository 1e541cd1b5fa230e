"""Versions in host memory: processes of the same host and user read them before they are at the root.

- `offer.py`: what a `Publisher` lends, on each rank; `borrow.py`: what a `Subscriber` borrows, from all ranks.
- `fd_passing.py`: gives the descriptors of the memory to other processes.
"""
