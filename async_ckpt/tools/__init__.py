"""Tools: what people look at runs with.

In: roots. Out: what they hold, for eyes and scripts. Knows nothing of: trainings.
"""
