"""What stands between the caller and the engine's processes."""
