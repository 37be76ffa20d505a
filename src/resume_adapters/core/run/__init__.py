"""One start of a run directory: open, begin, save, end a step, leave."""
