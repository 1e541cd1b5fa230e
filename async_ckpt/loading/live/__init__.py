"""Live objects that a restore fills, side by side with what was saved.

- `match` walks both sides, and finds the memory that each saved tensor belongs to.
- `kinds` says what may be looked into; `optimizer_forms` brings the state of an optimizer into the form that it takes.
"""
