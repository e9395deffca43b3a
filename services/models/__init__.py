"""Model files: downloads, tokenizers, chat templates."""
