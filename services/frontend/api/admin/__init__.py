"""Operator calls: busy thresholds, over HTTP and gRPC."""
