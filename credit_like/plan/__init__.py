"""Plan the layout of a training run: simulate its step on every rank for memory, operations, messages and time."""
