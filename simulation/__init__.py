"""Runs whole planes in one process, with virtual time, a network in memory and faults that a seed chooses."""
