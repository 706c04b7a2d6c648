"""Subcommands of `tfdp`, except those with packages of their own."""
