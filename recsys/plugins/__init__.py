"""Plugins for other inference engines, which keep generated tokens inside a catalog."""
