"""`python -m kvferry` is the `kvferry` command."""

from kvferry.cli import main

if __name__ == "__main__":
    main()
