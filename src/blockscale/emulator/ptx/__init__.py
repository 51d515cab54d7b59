"""PTX text to a program: tokens, declarations, statements and operands."""
