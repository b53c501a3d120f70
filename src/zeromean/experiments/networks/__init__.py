"""Networks that several experiments train."""
