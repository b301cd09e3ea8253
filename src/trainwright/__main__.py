"""`python -m trainwright`: the same program as the `trainwright` command; torchrun starts workers this way."""

from trainwright.cli.main import main

main()
