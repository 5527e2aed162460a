"""Its presence puts this folder on the import path, so that tests can share the modules that lie here."""

from __future__ import annotations

import signal

# A shell starts its background jobs with Ctrl-C ignored, and so do some CI machines. The tests of Ctrl-C, and the
# programs they start, need it as a terminal has it.
signal.signal(signal.SIGINT, signal.default_int_handler)
