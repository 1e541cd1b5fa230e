"""Live objects that a restore fills, side by side with the saved state.

- `match` walks both sides, and finds the memory that each saved tensor belongs to; `container_match` is its part about
  containers; `differences` collects what does not fit.
- `containers` fills dicts, lists and the like in place.
- `kinds` tells which objects are filled directly, and not by their state dicts.
- `optimizer_kinds` tells whose states an optimizer can go on from; `optimizer_forms` converts a saved state to the form
  that the live optimizer accepts.
"""
