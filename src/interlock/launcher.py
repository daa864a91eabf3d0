"""Processes that torchrun or another launcher started, one for each rank: what its variables say.

A launcher is recognised by ``RANK`` and ``WORLD_SIZE`` (more than one). ``--node-rank`` or ``--dist-init``,
given by the user, say that the ranks are started by this program instead, and its variables are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from interlock.engine.endpoints import Place
from interlock.errors import Refusal
from interlock.options import Given, Options
from interlock.parallel.store_address import StoreAddress

OWN_RANKS = ("node_rank", "dist_init")


@dataclass(frozen=True, slots=True)
class Launcher:
    """One process of a launch.

    Attributes:
        local_world_size: ranks of this machine.
        agent_store: the launcher itself hosts the store at the address (torchrun).
        attempt: counts restarts by the launcher.
    """

    rank: int
    world_size: int
    local_world_size: int
    address: str
    agent_store: bool
    attempt: str

    @property
    def nnodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size

    def applied_to(self, options: Options) -> Options:
        """Options with what the launcher decided.

        Raises:
            Refusal: the user set another size.
        """
        facts: dict[str, tuple[int | str, str]] = {
            "tp_size": (self.world_size, "WORLD_SIZE"),
            "nnodes": (self.nnodes, "WORLD_SIZE / LOCAL_WORLD_SIZE"),
            "node_rank": (self.node_rank, "RANK / LOCAL_WORLD_SIZE"),
            "dist_init": (self.address, "MASTER_ADDR:MASTER_PORT"),
        }
        given = dict(options.given)
        for name, (value, variable) in facts.items():
            if options.is_set(name) and options.given[name].value != value:
                raise Refusal(
                    option="--" + name.replace("_", "-"),
                    given=options.given[name].value,
                    rule=f"a launcher started one process for each rank, and its {variable} says {value}",
                    alternatives=[
                        f"--{name.replace('_', '-')} {value}",
                        "env -u RANK -u WORLD_SIZE interlock ...",
                    ],
                )
            given.setdefault(name, Given(value, f"launcher's {variable}", by_launcher=True))
        return Options(given)

    def place(self) -> Place:
        """The one rank of this process."""
        return Place(
            ranks=range(self.rank, self.rank + 1),
            ranks_on_node=self.local_world_size,
            node_rank=self.node_rank,
            store=StoreAddress(
                address=self.address,
                hosted_elsewhere=self.agent_store,
                prefix=f"interlock/{self.attempt}",
            ),
        )


def read_launcher(environ: Mapping[str, str], options: Options) -> Launcher | None:
    """The launcher that started this process, or None.

    Raises:
        Refusal: its variables are incomplete or do not fit each other.
    """
    if "RANK" not in environ or environ.get("WORLD_SIZE", "1") == "1":
        return None
    if any(options.is_set(name) for name in OWN_RANKS):
        return None
    rank, world_size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK")
    local_world_size = _local_world_size(environ, options, world_size)
    fits = (
        0 < local_world_size <= world_size
        and world_size % local_world_size == 0
        and 0 <= rank < world_size
        and rank % local_world_size == local_rank
    )
    if not fits:
        raise Refusal(
            option="RANK",
            given=rank,
            rule=f"with LOCAL_RANK {local_rank}, WORLD_SIZE {world_size} and {local_world_size} ranks a "
            "machine is not a launch of consecutive ranks, equally many on every machine",
        )
    host = _text(environ, "MASTER_ADDR")
    return Launcher(
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        address=f"[{host}]:{_integer(environ, 'MASTER_PORT')}"
        if ":" in host
        else f"{host}:{_integer(environ, 'MASTER_PORT')}",
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _local_world_size(environ: Mapping[str, str], options: Options, world_size: int) -> int:
    if "LOCAL_WORLD_SIZE" in environ:
        return _integer(environ, "LOCAL_WORLD_SIZE")
    if not options.is_set("nnodes"):
        raise Refusal(
            option="LOCAL_WORLD_SIZE",
            given="",
            rule="is not set by the launcher that set RANK, so it is not known which ranks share a machine",
            alternatives=["--nnodes 1"],
        )
    return world_size // (options.integer("nnodes") or 1)


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not text.isascii() or not text.isdigit():
        raise Refusal(option=name, given=text, rule="is set by a launcher and is not a whole number")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    if not text:
        raise Refusal(
            option=name,
            given="",
            rule="is not set, though RANK and WORLD_SIZE say that a launcher started this process",
            alternatives=[f"{name}=...", "env -u RANK -u WORLD_SIZE interlock ..."],
        )
    return text
