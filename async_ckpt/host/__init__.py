"""The host: threads and memory.

`limits.py`: how much of the machine this process may use; `numa.py`: memory next to a device.
`memory.py`: buffers that a driver may page-lock, and segments of them; `pool.py`: the budget, and leases of segments.
`threads.py`: thread pools; `waits.py`: waiting with signs of life; `life.py`: the states of an object as a table.
`process.py`: what a forked child must not keep; `deadlines.py`: how long somebody waits for something that may never come.
"""
