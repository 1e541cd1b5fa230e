"""The abilities of places: proved before the first save, remembered, and worked around where they are missing.

`place_proof.py` writes a tiny object and reads it back. `client_facts.py` remembers the facts that this process has
found out. `range_reader.py` reads ranges of objects, even where only whole objects can be read.
"""
