"""The host: threads and memory.

- `limits.py`: how much of the machine this process may use.
- `memory.py`: buffers that a driver may page-lock, and their segments; `pool.py`: the budget, and leases of segments.
- `shared_memory.py`: memory that other processes map.
- `threads.py`: thread pools, and the states of an object as a table; `loop.py`: the background thread with its asyncio
  loop.
- `waits.py`: waits that log their progress, and the limits of all waits.
- `operations.py`: events for listeners; `process.py`: state and threads that a forked child does not have.
"""
