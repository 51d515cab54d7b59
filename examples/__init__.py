"""Examples, which the package does not need. Run them from the repository's root."""
