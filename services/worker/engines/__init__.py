"""The engines: each makes tokens in its own way, behind the protocol of ../engine.py."""
