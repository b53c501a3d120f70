"""Whole models: made stochastic, made plain, without their means."""
