"""The generated gRPC stubs: see proto/build_stubs.py, which writes them when the package is built."""
