"""Text to typed facts: pure functions that keep what they understand and say what they do not."""
