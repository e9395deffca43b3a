"""gRPC on the HTTP/2 server. Source: "gRPC over HTTP2", doc/PROTOCOL-HTTP2.md of github.com/grpc/grpc."""
