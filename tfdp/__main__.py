"""`python -m tfdp`: the same as the `tfdp` command."""

import sys

from tfdp.cli import main

sys.exit(main())
