"""`moegraph worker`: lends the devices of this machine to an engine on another one.

`service` listens and never loads native code; `child` is the process that serves one client.
"""
