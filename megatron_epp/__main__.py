"""Entry point of ``python -m megatron_epp``, the same as the command ``megatron-epp``."""

import sys

from megatron_epp.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
