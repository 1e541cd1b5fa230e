"""The abilities of places: proved before the first save, remembered, and made up for where they are missing.

`place_proof.py` writes a tiny object and looks at what has become of it. `client_facts.py` remembers what was found out in
this process. `range_reader.py` reads objects, also where a part of one cannot be read.
"""
