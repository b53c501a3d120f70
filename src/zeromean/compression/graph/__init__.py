"""A model as a graph: how it is traced, and edited without a change of what it computes."""
