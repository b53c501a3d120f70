"""What nodes of a graph do to units: where they lie, which are constant, which are needed."""
