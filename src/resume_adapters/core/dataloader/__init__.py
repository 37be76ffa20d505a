"""Where a torch ``DataLoader`` is, and how to put it back."""
