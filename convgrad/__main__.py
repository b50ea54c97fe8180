"""Run the command as `python -m convgrad`."""

import sys

from convgrad._cli import main

sys.exit(main())
