"""Training of every variant from scratch or from a checkpoint, resumable and repeatable."""
