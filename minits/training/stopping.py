"""How a training is asked to stop: by signals, and by output that fails. Neither loses its work."""
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from threading import Thread
from typing import Any

# What asks a training to stop. (Windows has no SIGHUP.)
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
# The same signal so soon again is the same call: a terminal that closes sends SIGHUP twice, from
# the shell and from the kernel.
SAME_CALL = 0.2  # seconds
SAVING = "stopping after this step and saving; once more: stop now, the last checkpoint stays"
UNSAVED = "stopping after this step, without saving (--no-save); once more: stop now"
AT_ONCE = "stopped at once; what the last checkpoint holds stays: train --resume goes on from there"

Log = Callable[[str], None]


class Stop:
    """A context in which a first signal only asks to stop (`asked`); a second ends the process.

    A thread answers both at once. Python runs a signal's handler between two instructions of the
    main thread, and a step or a save may be one instruction that lasts for seconds. Signals that
    the process was started to ignore (`nohup`) stay ignored.
    """

    def __init__(self, say: Log) -> None:
        self.say, self.answer = say, SAVING
        self.asked = False
        self.error: Exception | None = None  # of output
        self.abandoning = False  # a signal raises KeyboardInterrupt

    def __enter__(self) -> "Stop":
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.thread = Thread(target=self.listen, daemon=True)
        self.thread.start()
        self.wakeup = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        heeded = [each for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
        self.previous = {each: signal.signal(each, self.ask) for each in heeded}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        self.sender.send(b"\0")
        self.thread.join()
        self.receiver.close()
        self.sender.close()

    def ask(self, *_: Any) -> None:
        """The handler of the signals."""
        self.asked = True
        if self.abandoning:
            self.abandoning = False
            raise KeyboardInterrupt

    def listen(self) -> None:
        """Answers every signal, whose number Python sends here before it runs the handler."""
        before, when = 0, -inf
        while number := self.receiver.recv(1)[0]:
            now = time.monotonic()
            if number not in SIGNALS or (number == before and now - when < SAME_CALL):
                continue
            second, before, when = bool(before), number, now
            with suppress(OSError, ValueError):  # the terminal may be gone
                self.say(AT_ONCE if second else self.answer)
            if second:
                os._exit(130)

    def guard(self, do: Callable, *arguments: Any) -> None:
        """Calls `do`, which puts something out; if it cannot, the training is asked to stop."""
        try:
            do(*arguments)
        except (OSError, ValueError) as error:
            self.error, self.asked = self.error or error, True

    def unless_asked(self, do: Callable, *arguments: Any) -> Any:
        """What `do` returns; None where a signal asks to stop, before it or at any point of it."""
        found = None
        try:
            self.abandoning = True
            if not self.asked:
                found = do(*arguments)
            self.abandoning = False
        except BaseException as error:  # an interrupt may come out as another one
            self.abandoning = False
            if not (self.asked or isinstance(error, KeyboardInterrupt)):
                raise
            found, self.asked = None, True
        return found
