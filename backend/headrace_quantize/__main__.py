"""`python -m headrace_quantize --config-json FILE`: started by `headrace quantize`."""

from __future__ import annotations

import sys

from headrace_quantize.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
