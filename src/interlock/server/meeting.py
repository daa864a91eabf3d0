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

    A list in the body has one entry a prompt, or one a choice; a single room serves all choices.

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
    return [_meeting(body, choice, prompts, n) for choice in range(prompts * n)]


def _meeting(body: GenerationBody, choice: int, prompts: int, n: int) -> Meeting:
    host, _ = _entry(body, "bootstrap_host", choice, prompts, n)
    port, _ = _entry(body, "bootstrap_port", choice, prompts, n)
    room, share = _entry(body, "bootstrap_room", choice, prompts, n)
    if host is None or room is None:
        raise bad_request("bootstrap_host and bootstrap_room need a value for every prompt")
    return Meeting(
        host=str(host), port=BOOTSTRAP_PORT if port is None else int(port), room=int(room), choice=share
    )


def _entry(
    body: GenerationBody, name: str, choice: int, prompts: int, n: int
) -> tuple[str | int | None, int]:
    """The value for a choice, and which one of those that share the value it is."""
    value = getattr(body, name)
    if not isinstance(value, list):
        return value, choice
    if len(value) == prompts:
        return value[choice // n], choice % n
    if len(value) == prompts * n:
        return value[choice], 0
    counts = f"{prompts} prompts" if n == 1 else f"{prompts} prompts and {prompts * n} choices"
    raise bad_request(f"{name} has {len(value)} entries for {counts}", param=name)
