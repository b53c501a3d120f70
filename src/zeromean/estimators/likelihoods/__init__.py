"""What the data say of the weights, as a function of them."""
