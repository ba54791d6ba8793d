"""From fields to batches: windows of the time axis, the loader and its worker processes, and their shared memory."""
