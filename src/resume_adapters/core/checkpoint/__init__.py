"""One checkpoint: from pending to committed, read again, chosen, kept, removed."""
