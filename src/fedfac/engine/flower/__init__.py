"""FedFac over a real network: Flower's SuperLink and SuperNodes carry the engine protocol.

    wire      what is sent, as bytes; and the checks of what comes back
    settings  what a run's config and a node's config say
    folder    a node's own folder: what is personal, and what waits between two messages
    ledger    what a node has answered in a run, and what it will therefore answer
    consent   which layers may be measured, and which masks a server may choose
    node      what a node does with a request: the in-process engine for one client
    engine    the engine protocol over requests and replies
    grid      requests and replies over Flower
    server    Flower's ServerApp
    client    Flower's ClientApp

Only ``grid``, ``server`` and ``client`` import flwr.
"""
