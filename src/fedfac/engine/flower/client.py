"""Flower's ClientApp: every message starts a process, answers, and ends."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfac.engine.flower.grid import from_content, to_content
from fedfac.engine.flower.node import Node
from fedfac.engine.flower.settings import Deployment, NodeConfig
from fedfac.engine.flower.wire import Request

app = ClientApp()


@app.query("hello")
@app.train("train")
@app.train("collect")
@app.evaluate("evaluate")
def answer(message: Message, context: Context) -> Message:
    """Answer one request of the server."""
    request = Request.read(from_content(message.content))
    node = Node(Deployment.read(context.run_config), NodeConfig.read(context.node_config, context.node_id))
    return Message(to_content(node.answer(request)), reply_to=message)
