"""`python -m deploy.cli`: the command `pdserve` where no script is installed."""

from deploy.cli.main import main

main()
