"""The options of `pdserve keys`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="API keys of tenants.")


@app.command("new")
def keys_new(
    tenant: Annotated[str, typer.Option(help="Whose key it is; a tenant may have several.")],
    file: Annotated[Path | None, typer.Option(help="Add its hash to this file; made when it is not there.")] = None,
) -> None:
    """Make a key and print it, once. Only its hash is kept: on stderr, or in the file."""
    from deploy.cli.keys import run_new

    run_new(tenant, file)


@app.command("list")
def keys_list(
    file: Annotated[Path, typer.Option(help="The file of keys.")],
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
) -> None:
    """Check a file of keys; print its tenants and the beginnings of their hashes."""
    from deploy.cli.keys import run_list

    run_list(file, tenant)
