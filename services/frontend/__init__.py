"""The frontend: clients in, workers out. Start with pipeline.py."""
