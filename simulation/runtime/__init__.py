"""What the simulated processes run on: time, chance, the event loop, sockets and the network."""
