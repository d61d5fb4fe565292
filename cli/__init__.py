"""The program `foregate`: one file per sub-command."""
