"""The text of JSON that a client sends, before it is decoded."""
