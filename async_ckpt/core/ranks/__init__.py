"""The protocol of the ranks that save one state together. It uses no collectives, only messages in a store.

- `world.py`: which rank this process is; `store.py`: its connection to the store of the ranks; `start.py`: how ranks
  find each other; `word_log.py`: the log of rank 0's words; `heartbeats.py`: which ranks are lost.
- `peers.py`: all that one checkpointer knows of the other ranks; `meeting.py`: what ranks exchange before the first
  save and at a restore, and rank 0's answers for all.
- `calls.py`: the joint saves of all ranks, matched by rank 0's words; `divide.py`: the part of a save that this rank
  writes.
- `rendezvous.py`: one call of all ranks: a part of each rank, and rank 0's decision; `agreement.py`: the rendezvous of
  a save at one root; `comparison.py`: rank 0's checks of all receipts.
- `one_off.py`: the folder of a save without a run.
- `shared_values.py`: values that should be equal on all ranks.
"""
