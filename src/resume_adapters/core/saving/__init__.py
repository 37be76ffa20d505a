"""When a save happens, and who finishes it."""
