"""A small MCP server for tests: `python mcp_server.py stdio`, written here because it starts at once, or `http PORT` on
loopback, by the library."""

import json
import os
import subprocess
import sys
import time

visits = 0


def price(item: str, number: int = 1) -> str:
    """Return the price of some pieces of an item."""
    prices = {"shoe": 40, "hat": 15}
    if item not in prices:
        return f"there is no {item} in this shop"
    return str(prices[item] * number)


def visit() -> str:
    """Count the visits of this server."""
    global visits
    visits += 1
    return str(visits)


def catalogue(lines: int) -> str:
    """Return a long text."""
    return "x" * lines


def processes(file: str) -> str:
    """Start a process that ignores the end of its input, and write its id and the server's to a file."""
    started = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    with open(file, "a") as ids:
        print(started.pid, os.getpid(), file=ids)
    return "started"


def fail(how: str) -> str:
    """Fail in this way."""
    if how == "die":
        os._exit(3)
    time.sleep(600)
    return "late"


TOOLS = {function.__name__: function for function in (price, visit, catalogue, processes, fail)}
TYPES = {str: "string", int: "integer"}


def listed(name):
    function = TOOLS[name]
    properties = {key: {"type": TYPES[kind]} for key, kind in function.__annotations__.items() if key != "return"}
    required = list(properties)[: len(properties) - len(function.__defaults__ or ())]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": function.__doc__, "inputSchema": schema}


def answered(method, asked):
    """The result of a request, or the code and the message of an error."""
    if method == "initialize":
        server = {"name": "shop", "version": "1"}
        return {"protocolVersion": asked["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":  # in two pages
        names = list(TOOLS)
        if asked.get("cursor"):
            return {"tools": [listed(n) for n in names[2:]]}
        return {"tools": [listed(n) for n in names[:2]], "nextCursor": "2"}
    if method == "tools/call":
        try:
            text = TOOLS[asked["name"]](**asked["arguments"])
        except TypeError as error:
            return -32602, f"{asked['name']}: {error}"
        picture = {"type": "image", "data": "", "mimeType": "image/png"}
        return {"content": [{"type": "text", "text": text}, *([picture] if text == "15" else [])]}
    return -32601, f"no method {method}"


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            result = answered(request["method"], request.get("params") or {})
            error = isinstance(result, tuple)
            outcome = {"error": {"code": result[0], "message": result[1]}} if error else {"result": result}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **outcome}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        serve()
    else:
        from mcp.server.mcpserver import MCPServer

        server = MCPServer("shop")
        for function in TOOLS.values():
            server.tool()(function)
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
