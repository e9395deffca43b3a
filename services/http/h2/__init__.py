"""HTTP/2 by prior knowledge: frames, flow control and streams. Source: RFC 9113, RFC 7541."""
