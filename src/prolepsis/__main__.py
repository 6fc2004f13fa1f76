"""`python -m prolepsis` is the command `prolepsis`."""

from prolepsis.cli import main

main()
