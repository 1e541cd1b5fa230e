"""The page of a run: one HTML file with its saves as pictures and tables.

- `run_page.py` is the subcommand `page`: it reads histories, and writes the file.
- `columns.py` turns the events of a history into columns, `pictures.py` turns columns into pictures, and `summary.py`
  into the facts at the top.
- `document.py` makes the text of the page. `assets/page.js` draws the pictures in the browser with uPlot, included as
  published: it draws 10,000 points in milliseconds, has 50 kB, no dependencies and the MIT license.
"""
