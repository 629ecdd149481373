"""`pdserve bench`: open-loop load against any endpoint that speaks OpenAI's API.

    plan (what is sent when) -> run (send it then, whatever the answers do) -> results -> report, plot

A request's latency counts from when it was planned, not from when it got its turn: a slow server cannot hide its
queue by slowing the load down.
"""
