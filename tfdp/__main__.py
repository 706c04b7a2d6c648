"""`python -m tfdp`: the same as the `tfdp` command."""

import sys

from tfdp.tools.commands.cli import main

sys.exit(main())
