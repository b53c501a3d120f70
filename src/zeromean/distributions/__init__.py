"""What q(W) and p(W) are: posteriors, priors, and the noise that posteriors draw."""
