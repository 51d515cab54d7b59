"""Second opinions on the library's bytes: none of these files uses its arithmetic."""
