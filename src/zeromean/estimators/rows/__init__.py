"""Rows of data, from memory, chunks or Dask, and the sums over them."""
