"""Neklyudov et al. (2019), Variance networks, and its poster."""
