"""Lets `python -m foregate.cli` stand for the program `foregate`."""

from .main import main

raise SystemExit(main())
