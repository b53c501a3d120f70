"""The papers' tables and figures, one module each; the only part that knows papers.

`registry` says what an experiment is, `runs` how it is run and what is kept of it, `report` how it
is shown, and `cli` is the command line.
"""
