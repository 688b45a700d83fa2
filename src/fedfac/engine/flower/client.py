"""Flower's ClientApp: every message starts a process, answers, and ends."""

from __future__ import annotations

import logging

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfac.engine.flower.grid import from_content, to_content
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Request, problem_reply
from fedfac.errors import FedfacError

log = logging.getLogger("fedfac")
app = ClientApp()


@app.query("hello")
@app.train("train")
@app.train("collect")
@app.evaluate("evaluate")
def answer(message: Message, context: Context) -> Message:
    """Answer one request of the server."""
    try:
        request = Request.read(from_content(message.content))
        node = Node(Deployment.read(context.run_config), NodeConfig.read(context.node_config, context.node_id))
    except FedfacError as error:
        log.exception("a request that cannot be answered")
        return Message(to_content(problem_reply(f"it failed with a {type(error).__name__}")), reply_to=message)
    return Message(to_content(node.answer(request)), reply_to=message)
