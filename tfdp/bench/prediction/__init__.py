"""A machine's numbers measured, and steps predicted from them beside measured ones."""
