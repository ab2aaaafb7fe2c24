"""Pure functions on tensors: torch and nothing else."""
