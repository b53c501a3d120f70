"""Random cases for `tools/fuzz.py`, one file for each sort.

`prepare(folder)` of each gives a function that makes one case from a generator of random numbers
and returns REFUSED or CHECKED; what it raises is a failure.
"""
