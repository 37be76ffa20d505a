"""One training call of any framework."""
