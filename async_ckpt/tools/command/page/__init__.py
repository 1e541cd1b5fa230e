"""The page of a run: one HTML file with its saves as pictures and tables.

- `run_page.py` is the word `page` of the command: it reads histories, and writes the file.
- `columns.py` turns the events of a history into columns, `pictures.py` into the pictures that are worth showing, and
  `summary.py` into the facts at the top.
- `document.py` makes the text of the page. `assets/page.js` draws the pictures in the browser by uPlot, which is there
  as it is published: it draws 10,000 points in milliseconds, has 50 kB, no dependencies and the MIT license.
"""
