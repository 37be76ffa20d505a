"""What several adapters use and the core must not know."""
