"""Tools: programs with which people inspect and change runs.

In: roots. Out: their contents, for people and scripts. Knows nothing of: trainings.
"""
