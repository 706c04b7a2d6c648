"""`python -m tfdp`: the same as the `tfdp` command."""

from tfdp.tools.commands.cli import run

run()
