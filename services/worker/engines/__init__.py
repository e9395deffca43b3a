"""The engines: implementations of the protocol in ../engine.py."""
