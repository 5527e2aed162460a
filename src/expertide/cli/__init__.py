"""The command line: `expertide run|chat|inspect|plan|doctor|bench|eval|trace`.

Commands turn flags into calls and results into text or JSON. Results go to stdout, everything else to stderr. Exit
codes: 0 done, 1 failed, 2 usage, 130 Ctrl-C; an error is one to three lines, never a traceback. Nothing here imports
torch: `--help`, `inspect`, `plan` and every refusal of a file are over before it would be loaded.
"""
