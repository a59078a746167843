"""Driving Hugging Face decoders: tokens, positions, masks, slots. Knows no beams and no items."""
