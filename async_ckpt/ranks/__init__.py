"""The protocol of the ranks that save one state together: no collective, only words in a store and files in a step's folder.

- `world.py`: which rank this process is, and messages by the store of the process group; `talk.py`: those of one restore.
- `meeting.py`: waiting for the word that rank 0 gives a start of saves, exports or publications.
- `attempts.py`: the joint save of all ranks, its number and name, and the tables of states known when it begins.
- `agreement.py`: how a joint save is committed or refused at one root; `comparison.py`: rank 0's checks of all receipts.
- `shared_root.py`: whether all ranks see the same root; `shared_values.py`: values that all ranks should have alike.
- `answers.py`: what rank 0 answers for all ranks.
"""
