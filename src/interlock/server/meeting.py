"""Where the halves of a request meet: the fields that routers of disaggregated servers add to a body."""

from __future__ import annotations

from interlock.engine.messages import Meeting
from interlock.plan.disaggregation import BOOTSTRAP_PORT, NONE
from interlock.plan.launch_plan import LaunchPlan
from interlock.server.errors import bad_request
from interlock.server.protocol import GenerationBody

FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def meetings(body: GenerationBody, plan: LaunchPlan, *, prompts: int, n: int) -> list[Meeting | None]:
    """One for each choice: choice i * n + j is sample j of prompt i.

    A list in the body has one entry a prompt; a single room serves all choices.

    Raises:
        ApiError: fields that this server's role needs are missing, or it has no use for them.
    """
    given = [name for name in FIELDS if getattr(body, name) is not None]
    mode = plan.disaggregation_mode
    if mode == NONE:
        if given:
            raise bad_request(
                f"{given[0]}: this server is neither a prefill nor a decode server; ask it without a room, "
                "or start it with --disaggregation-mode",
                param=given[0],
            )
        return [None] * (prompts * n)
    for name in ("bootstrap_host", "bootstrap_room"):
        if name not in given:
            raise bad_request(
                f"this is a {mode} server: a request needs {name}, which a router adds "
                "(interlock route is a small one)",
                param=name,
            )
    made: list[Meeting | None] = []
    for index in range(prompts):
        host = _entry(body.bootstrap_host, "bootstrap_host", index, prompts)
        port = _entry(body.bootstrap_port, "bootstrap_port", index, prompts)
        room = _entry(body.bootstrap_room, "bootstrap_room", index, prompts)
        if host is None or room is None:
            raise bad_request("bootstrap_host and bootstrap_room need a value for every prompt")
        own_room = isinstance(body.bootstrap_room, list)
        made += [
            Meeting(
                host=str(host),
                port=BOOTSTRAP_PORT if port is None else int(port),
                room=int(room),
                choice=sample if own_room else index * n + sample,
            )
            for sample in range(n)
        ]
    return made


def _entry(value: object, name: str, index: int, prompts: int) -> str | int | None:
    if isinstance(value, list):
        if len(value) != prompts:
            raise bad_request(f"{name} has {len(value)} entries for {prompts} prompts", param=name)
        value = value[index]
    assert value is None or isinstance(value, str | int)
    return value
