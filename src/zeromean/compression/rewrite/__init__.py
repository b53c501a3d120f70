"""Changes of a graph that keep its outputs: fold, remove, multiply sparsely."""
