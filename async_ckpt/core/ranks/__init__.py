"""The protocol of the ranks that save one state together: no collective, only words in a store and files in a step's
folder.

- `world.py`: which rank this process is, and messages by the store of the process group; `peers.py`: all that one
  checkpointer knows.
- `heartbeats.py`: which ranks are lost.
- `meeting.py`: the words of ranks to each other, their token and classes, those of one restore; `answers.py`: rank
  0's for all.
- `attempts.py`: the joint save of all ranks, its states, number and name; `divide.py`: the part of it that this rank
  writes.
- `agreement.py`: how a joint save is committed or refused at one root; `comparison.py`: rank 0's checks of all
  receipts.
- `one_off.py`: the folder of a save without a run.
- `shared_root.py`: whether all ranks see the same root; `shared_values.py`: values that all ranks should have alike.
"""
