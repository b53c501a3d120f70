"""Files that are whole or not there: how they are written, locked, checked and read."""
