"""Why and when to stop.

Read ``policy`` (what the user asks for), ``signals`` (the flag of one process), ``vote`` (how all ranks agree), then
``walltime`` (Slurm too) and ``processes`` (other reasons to stop).
"""
