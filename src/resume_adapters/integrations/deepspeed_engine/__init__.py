"""The state of a DeepSpeed engine, whichever framework drives it."""
