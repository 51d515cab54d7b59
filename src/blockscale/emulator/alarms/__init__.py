"""Kinds of checks, what they find, and what may stand."""
