"""Process of one of several runs: `python -m rein.cli.child COMMAND ...` runs `rein COMMAND ...`.

Its standard input is a pipe from the parent process. If the parent dies, the pipe closes, and the run ends and is saved
as after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading

from rein.cli import main


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the pipe is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main()
