"""What the lectures on Bayesian networks name and the papers do not: learning over time."""
