"""The frontend's metrics."""
