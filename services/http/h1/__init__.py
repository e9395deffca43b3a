"""HTTP/1.1: the connection of a client, its parser, and the way in which it sends answers."""
