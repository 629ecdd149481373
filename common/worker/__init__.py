"""The shell that a prefill and a decode worker share: streams to routers, the compute thread, lease, lifecycle."""
