"""What surrounds a step while it is dry-run or runs as written: secret random numbers (`randomness`), loggers that do
nothing (`silence`), and signals that wait until its chunk is done (`signals`).

Nothing that a step leaves behind is set back; `dpexp.privacy.checks` looks for it.
"""
