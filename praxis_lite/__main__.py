"""`python -m praxis_lite`: the same as the command `praxis`."""

from praxis_lite.main import main

if __name__ == "__main__":
    main()
