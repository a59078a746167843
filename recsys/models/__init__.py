"""Driving Hugging Face decoders: tokens, positions, masks, cache slots. Knows no beams, no items."""
