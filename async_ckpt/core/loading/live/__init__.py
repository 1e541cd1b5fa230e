"""Live objects that a restore fills, side by side with the saved state.

- `match` walks both sides, and finds the memory that each saved tensor belongs to; `differences` collects what does not
  fit.
- `containers` fills dicts, lists and the like in place.
- `optimizer_kinds` tells whose states an optimizer can go on from; `optimizer_forms` converts a saved state to the form
  that the live optimizer accepts.
"""
