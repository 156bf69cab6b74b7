"""The program of a process that plays episodes with an agent's function, many at once: `python agent_program.py PLACE`.

It is run as a file by the interpreter that has the agent's packages, and imports nothing of ptf. On its standard input
it reads lines of JSON: first `{"use": "module:function", "args": {…}, "path": […], "own": […], "file": …}`, to which
the line `{}` or `{"error": …}` is the answer; `path` has the first directories on the path of modules, `own` the last,
those of the user's modules, and `file` is that of the module, or null if it is found by its name. Then
`{"episode": n, "row": …, "base_url": …, "api_key": …, "seed": …}`, to which `{"episode": n, "reward": …}` or
`{"episode": n, "error": …}` is the answer, and `{"cancel": n}`. It ends with its standard input, and removes its
directory `PLACE` then: what wrote to it may have been killed. What agents print goes to standard error.
"""

import asyncio
import copy
import ctypes
import functools
import importlib
import importlib.machinery
import inspect
import json
import os
import shutil
import sys
import threading
import traceback
import types

ARGUMENTS = ("row", "base_url", "api_key", "seed")
PREFIX = "ptf-agent-"  # of the names of directories that may be removed


def main():
    """Serve until the standard input ends."""
    tasks, replies, lock = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what agents start must not read the tasks
    os.dup2(2, 1)
    # keeps this process's memory and files from the programs that agents start (not from root)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE

    def reply(**values):
        with lock:
            replies.write(json.dumps(values) + "\n")
            replies.flush()

    line = tasks.readline()
    if not line:
        leave()
    first = json.loads(line)
    sys.path[:1] = first["path"]  # in place of this file's directory
    sys.path += first["own"]  # last: a file such as queue.py or httpx.py must hide no other module
    try:
        module, _, name = first["use"].partition(":")
        if first["file"]:
            loaded = types.ModuleType(module)
            importlib.machinery.SourceFileLoader(module, first["file"]).exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
        function = functools.partial(getattr(loaded, name), **first["args"])
    except BaseException as error:
        reply(error=said(error))
        return
    reply()
    if inspect.iscoroutinefunction(function.func):
        in_loop(function, tasks, reply)
    else:
        in_threads(function, tasks, reply)


def leave():
    """End this process, and remove its directory, unless it has another name than ptf gives such ones."""
    place = sys.argv[1] if len(sys.argv) > 1 else ""
    if os.path.basename(place).startswith(PREFIX):
        shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def said(error):
    """Return an error in words, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:500]} ({frame.filename}:{frame.lineno})"


def checked(value):
    """Return what an agent returned, as a number or None. Raises TypeError."""
    if value is None:
        return None
    if not hasattr(value, "__float__"):
        raise TypeError(f"the agent returned a {type(value).__name__}, which is neither a number nor None")
    return float(value)


def called(function, message):
    """Call the agent's function for an episode; what it does to its arguments is not seen by others."""
    return function.func(*(message[name] for name in ARGUMENTS), **copy.deepcopy(function.keywords))


def in_threads(function, tasks, reply):
    """Play each episode in a thread of its own. A thread cannot be cancelled: it ends when its next request fails."""

    def play(message):
        try:
            reward = checked(called(function, message))
        except BaseException as error:
            reply(episode=message["episode"], error=said(error))
        else:
            reply(episode=message["episode"], reward=reward)

    for line in iter(tasks.readline, ""):
        message = json.loads(line)
        if "cancel" not in message:
            threading.Thread(target=play, args=(message,), daemon=True).start()
    leave()


def in_loop(function, tasks, reply):
    """Play each episode as a task of an event loop."""
    loop, playing = asyncio.new_event_loop(), {}

    def ended(number, task):
        del playing[number]
        try:
            reply(episode=number, reward=checked(task.result()))
        except BaseException as error:  # a task that was cancelled too
            reply(episode=number, error=said(error))

    def take(message):
        if "cancel" not in message:
            number = message["episode"]
            playing[number] = loop.create_task(called(function, message))
            playing[number].add_done_callback(functools.partial(ended, number))
        elif message["cancel"] in playing:
            playing[message["cancel"]].cancel()

    def read():
        for line in iter(tasks.readline, ""):
            loop.call_soon_threadsafe(take, json.loads(line))
        leave()

    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


if __name__ == "__main__":
    main()
