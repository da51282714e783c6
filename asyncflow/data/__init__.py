"""From a source to token ids: items, their tokenizer, the table of prompts, and the order they are drawn in."""
