"""A client of gRPC on the simulated network: grpcio's own has threads and sockets of its own."""
