"""`python -m la_bench` is `la-bench`."""

import sys

from la_bench.cli import main

sys.exit(main())
