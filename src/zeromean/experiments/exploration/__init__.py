"""Neklyudov et al. (2019), section 6.2, and around it: noise that explores."""
