"""`python -m zeromean`."""

import sys

from zeromean.experiments.cli import main

sys.exit(main())
