"""The host: threads and memory.

- `limits.py`: how much of the machine this process may use.
- `memory.py`: buffers that a driver may page-lock, and segments of them; `pool.py`: the budget, and leases of segments.
- `shared_memory.py`: memory that other processes map.
- `threads.py`: thread pools, and the states of an object as a table; `loop.py`: the background thread with its asyncio
  loop.
- `waits.py`: waits with signs of life, and the limits of all waits.
- `operations.py`: what listeners are told; `process.py`: state that a forked child must not keep, and threads that it
  lacks.
"""
