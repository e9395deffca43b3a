"""gRPC-Web over HTTP/1.1 and HTTP/2, for pages. Source: doc/PROTOCOL-WEB.md of github.com/grpc/grpc."""
