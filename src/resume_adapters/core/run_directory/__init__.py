"""The ``.resume`` directory, and what is done once for a run directory."""
