"""`python -m zeromean`."""

import sys

from zeromean.cli import main

sys.exit(main())
