"""Structured data into training: exact to the row, at the speed of the decoder."""
