"""Uncertainty for a network that is trained already: candidates, their choice, what came of it."""
