"""From device to host memory: the segment pool, the stager, the guard, and the threads that carry the copies."""
