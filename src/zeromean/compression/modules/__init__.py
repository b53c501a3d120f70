"""Modules that compressed networks are made of."""
