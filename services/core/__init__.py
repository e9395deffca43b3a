"""The types that every process shares: requests, calls, failures, and the layer interface."""
