"""The layer between the caller and the engine's processes."""
