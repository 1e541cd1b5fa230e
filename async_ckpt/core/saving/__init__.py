"""One save, from its call to its end, and the facts that it leaves for later saves.

To read, in this order: `request` (the checked arguments), `saver` (the call), `save` (the states of a save), `attempt`
(how an archive is written and committed), `drain` and `block_digests` (segments on their way to storage),
`file_target` and `targets` (a file, or a step of a run). Around them: `admission` and `planner` before a save,
`ledger`, `exit` and `handle` (with its progress bar) after it; `lineage` and unchanged groups from save to save;
`policy` and `signals` (when a save is due); `kept_memory` for saves without a run.
"""
