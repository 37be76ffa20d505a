"""A hand-written training loop that resumes."""
