"""Live objects that a restore fills with the saved state.

- `match` walks the live and the saved state, and finds the memory that each saved tensor belongs to; `differences`
  collects everything that does not fit.
- `containers` fills dicts, lists and the like in place.
- `optimizer_kinds` decides which saved states an optimizer can continue from; `optimizer_forms` converts a saved state
  to the form that the live optimizer accepts.
"""
