"""Live objects that a restore fills, side by side with the saved state.

- `match` walks both sides, and finds the memory that each saved tensor belongs to; `container_match` is its part about
  containers; `differences` collects what does not fit.
- `containers` fills dicts, lists and the like in place; `filled_objects` finds one that is at two places of the state.
- `kinds` tells which objects are filled directly; `state_dicts` takes the state dicts of the others.
- `optimizer_forms` converts the saved state of an optimizer to the form that the live one accepts.
"""
