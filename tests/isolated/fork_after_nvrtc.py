"""A child of a process that has compiled compiles too, and so does the parent afterwards; also from several threads."""

import os
import signal
import tempfile
import threading

from engine import fresh_source, instance
from tkjit import _core

os.environ["TKJIT_CACHE_DIR"] = tempfile.mkdtemp()
instance().compiled("sm_90a")
shared = fresh_source()
signal.alarm(100)  # a deadlock ends here


def child_of(action) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            action()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return child


def compile_some() -> None:
    before = _core.stats()["compiles"]
    assert instance().compiled("sm_90a").facts["registers"] > 0
    assert _core.stats()["compiles"] == before + 1
    threads = [threading.Thread(target=lambda: instance(shared).compiled("sm_90a")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert instance(shared).compiled("sm_90a").image


children = [child_of(compile_some) for _ in range(3)]
compile_some()
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]

# A child that is killed while it compiles leaves no lock behind.
child = child_of(lambda: [instance().compiled("sm_90a") for _ in range(10**6)])
threading.Event().wait(0.1)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
waits = _core.stats()["lock_waits"]
instance().compiled("sm_90a")
assert _core.stats()["lock_waits"] == waits
