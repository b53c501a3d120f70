"""Relevance by variational dropout: the search over means and variances."""
