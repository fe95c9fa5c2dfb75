"""Wheels: build, normalise, inspect."""
