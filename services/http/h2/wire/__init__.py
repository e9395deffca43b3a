"""What is on the wire: frames and header fields."""
