"""`python -m oasis_eval` is `oasis-eval`; launchers of several processes want a module."""

from oasis_eval.cli import main

if __name__ == "__main__":
    main()
