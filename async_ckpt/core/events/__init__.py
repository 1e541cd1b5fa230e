"""The history of a run: what happened there, for people. Nothing in this library trusts it.

`shapes.py` has the kinds of events and their fields, `log.py` the bounded log of them at one root.
"""
