"""`python -m phaseloom` is the command `phaseloom`."""

from phaseloom.cli.main import main

if __name__ == "__main__":
    main()
