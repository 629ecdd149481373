"""Python runs this at the start of every process that has its folder on PYTHONPATH: those of an instrumented cluster.

A thread takes orders from the chaos run over a socket named after the process: the name of a plant and its arguments.
Nothing in the product knows of it.
"""

import os

FOLDER_VARIABLE = "CHAOS_FOLDER"  # PDSERVE_... would be a setting: a router is not given those


def _serve(folder: str) -> None:
    import json
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/.{os.getpid()}")
        server.listen()
        os.rename(f"{folder}/.{os.getpid()}", f"{folder}/{os.getpid()}")  # a reader of the name can connect
        while True:
            connection, _ = server.accept()
            with connection, connection.makefile() as orders:
                answer = _obey(json.loads(orders.readline()))
                connection.sendall(json.dumps(answer).encode() + b"\n")


def _obey(order: dict[str, object]) -> dict[str, object]:
    from tests.chaos.inside import plants

    try:
        arguments = order["arguments"]
        assert isinstance(arguments, dict)
        return {"answer": getattr(plants, str(order["plant"]))(**arguments)}
    except Exception as error:
        return {"error": repr(error)}


if _folder := os.environ.get(FOLDER_VARIABLE):
    import threading

    threading.Thread(target=_serve, args=(_folder,), name="chaos", daemon=True).start()
