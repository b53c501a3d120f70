"""From a posterior to a network that is smaller and faster; README.md draws the way."""
