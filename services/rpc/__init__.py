"""Protobuf messages and gRPC: codecs, frames, statuses, servers."""
