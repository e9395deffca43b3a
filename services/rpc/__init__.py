"""Protobuf messages and gRPC: codecs, token columns, frames, statuses, servers."""
