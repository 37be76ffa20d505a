"""The demo: a training run that is killed three times, compared with one that never was."""
