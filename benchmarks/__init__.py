"""What the package costs, measured side by side with a bare Trainer: ``python -m benchmarks``."""
