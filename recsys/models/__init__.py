"""Running Hugging Face decoders on explicit tokens, positions, masks and cache slots."""
