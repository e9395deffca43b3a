"""How long, how often and how much: what a client may ask of one connection without using it."""
