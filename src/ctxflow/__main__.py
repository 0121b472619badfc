"""`python -m ctxflow` is the `ctxflow` command."""

from ctxflow.cli import main

main()
