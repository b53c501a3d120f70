"""Lectures on Bayesian networks: sparse variational dropout."""
