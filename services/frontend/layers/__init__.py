"""The layers of the frontend pipeline, one module each."""
