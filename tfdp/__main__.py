"""`python -m tfdp`: the same as the `tfdp` command."""

import sys

from tfdp.commands.cli import main

sys.exit(main())
