"""Relevance by evidence: the search over sets of features."""
