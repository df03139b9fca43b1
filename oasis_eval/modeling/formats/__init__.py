"""Public checkpoint formats: recognised by configuration and tensor names, read as our own."""
