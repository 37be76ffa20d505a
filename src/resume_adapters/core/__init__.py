"""The rules of exact resume, free of any training framework."""
