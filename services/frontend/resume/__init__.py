"""Answers that are resumed: where they are, and how a client's cursor is checked."""
