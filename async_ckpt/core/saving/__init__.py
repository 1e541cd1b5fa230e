"""One save, from its call to its end, and the facts that it leaves for later saves.

To read: `request` (what is asked), `saver` (the call), `save` (the states of a save), `story` and `delivery` (how it is
written and committed), `drain` and `block_digests` (segments on their way), `file_target` and `targets` (a file, or a
step at a root). Around it: `admission` and `planner` before, `ledger`, `exit` and `handle` (with its bar) after;
`lineage` and unchanged groups from save to save; `policy` and `signals` (when one is due); `default` for saves without
a run.
"""
