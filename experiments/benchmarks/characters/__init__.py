"""A character-level GPT: text, model, training."""
