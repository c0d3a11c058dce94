"""The program: `eventpub`, or `python -m eventpub`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; Ctrl-C during its import exits without a traceback."""
    try:
        from eventpub import cli
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
