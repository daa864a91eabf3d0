"""A child process that tries grammars, so that one that eats time or memory, or crashes, harms nobody.

Started as ``python -m interlock.structured.process``. Standard input and output carry frames of a length (4
bytes, little endian) and msgpack: first a ``Setup``, then a ``GrammarSpec`` for each answer, which is "" for
a grammar that compiles or else what is wrong with it. The process ends when its input is closed.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import struct
import sys
import tempfile
import threading
from typing import IO, BinaryIO

import msgspec

from interlock.errors import InterlockError
from interlock.heap import steady_heap
from interlock.structured.compiler import GrammarCompiler, GrammarError, plain_message
from interlock.structured.spec import GrammarSpec
from interlock.structured.vocabulary import Vocabulary

_LENGTH = struct.Struct("<I")
READY = "ready"
STACK_BYTES = 6 << 20
"""Less than a rank's thread has, so that nesting which passes here passes there."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """``memory``: bytes of address space that compiling may take beyond what the process has."""

    model_path: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    memory: int


def write_frame(stream: BinaryIO | IO[bytes], message: object) -> None:
    """Length, then msgpack."""
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO | IO[bytes]) -> bytes | None:
    """The next frame, None at the end of the stream."""
    head = _read_exactly(stream, _LENGTH.size)
    return None if head is None else _read_exactly(stream, _LENGTH.unpack(head)[0])


def _read_exactly(stream: BinaryIO | IO[bytes], count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            return None
        data += part
    return data


def main() -> None:
    """The child that tries grammars: frames in on standard input, verdicts out on standard output."""
    steady_heap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(sys.stdin.buffer, frames), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    setup = msgspec.msgpack.decode(frames.get(), type=Setup)
    with tempfile.TemporaryFile() as warnings:
        os.dup2(warnings.fileno(), 1)
        os.dup2(warnings.fileno(), 2)
        try:
            vocabulary = Vocabulary.load(setup.model_path, size=setup.vocab_size, stop_ids=setup.stop_ids)
            compiler = GrammarCompiler(vocabulary)
        except InterlockError as error:
            write_frame(answers, str(error))
            return
        write_frame(answers, READY)
        _limit_memory(setup.memory)
        threading.stack_size(STACK_BYTES)
        trials = threading.Thread(target=_try_all, args=(compiler, frames, answers, warnings))
        trials.start()
        trials.join()


def _try_all(
    compiler: GrammarCompiler, frames: queue.SimpleQueue[bytes], answers: BinaryIO, warnings: IO[bytes]
) -> None:
    while True:
        spec = msgspec.msgpack.decode(frames.get(), type=GrammarSpec)
        write_frame(answers, _trial(compiler, spec, warnings))


def _trial(compiler: GrammarCompiler, spec: GrammarSpec, warnings: IO[bytes]) -> str:
    """What is wrong with a grammar, "" for nothing. What the library only warns about is an error: it then
    leaves a part of the constraint out."""
    os.ftruncate(warnings.fileno(), 0)
    os.lseek(warnings.fileno(), 0, os.SEEK_SET)
    try:
        compiler.compile(spec)
    except GrammarError as error:
        return str(error) or "the grammar does not compile"
    except MemoryError:
        return "compiling it takes more memory than this server allows"
    os.lseek(warnings.fileno(), 0, os.SEEK_SET)
    said = os.read(warnings.fileno(), 4096).decode(errors="replace")
    return plain_message(said) if "Warning:" in said else ""


def _read_all(stream: BinaryIO | IO[bytes], frames: queue.SimpleQueue[bytes]) -> None:
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)


def _limit_memory(extra: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))


if __name__ == "__main__":
    main()
