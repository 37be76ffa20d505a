"""Why and when to stop: the policy, the signals, the walltime, and how all ranks agree."""
