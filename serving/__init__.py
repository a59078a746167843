"""Models -> answers over REST."""
