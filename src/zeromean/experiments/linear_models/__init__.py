"""Molchanov & Ashuha (2016), the talk: sparse linear models."""
