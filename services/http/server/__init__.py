"""The HTTP/1.1 server: accepts connections, parses requests, writes responses."""
