"""``interlock plan --receipts URL``: what a running server planned, and what its ranks observed."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec

from interlock.console import console
from interlock.errors import InterlockError
from interlock.option_kinds import Secret
from interlock.plan.launch_plan import LaunchPlan, Source
from interlock.plan.receipts import Mismatch, check, option_of

TIMEOUT_SECONDS = 10.0


class Shown(msgspec.Struct, frozen=True):
    """The answer of ``GET /plan``; receipts by rank (a string in JSON)."""

    plan: LaunchPlan
    receipts: dict[str, dict[str, object]]


def compare(url: str, key: Secret | None, local: LaunchPlan | None, *, as_json: bool) -> int:
    """Print both sides; returns 1 when any differs.

    Args:
        local: a plan made here; what the user set in it is compared with the server's. Or None.
    """
    shown = fetch(url, key)
    receipts = {int(rank): items for rank, items in shown.receipts.items()}
    mismatches = check(shown.plan, receipts)
    if local is not None:
        mismatches += list(differences(local, shown.plan))
    if as_json:
        content = {
            "plan": shown.plan,
            "receipts": shown.receipts,
            "mismatches": [
                {"item": m.item, "option": m.option, "rank": m.rank, "layer": m.layer, "message": str(m)}
                for m in mismatches
            ],
        }
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
    else:
        from interlock.plan.explain import explain_receipts

        console().print(explain_receipts(shown.plan, receipts, mismatches))
    return 1 if mismatches else 0


def differences(local: LaunchPlan, served: LaunchPlan) -> Iterator[Mismatch]:
    """What the user asked for here and the server's plan has otherwise."""
    for item, provenance in local.provenance.items():
        ours, theirs = getattr(local, item), getattr(served, item)
        if provenance.source is Source.USER and ours != theirs:
            yield Mismatch(item, option_of(item), 0, None, ours, theirs, observer="the server's plan")


def fetch(url: str, key: Secret | None) -> Shown:
    """``GET URL/plan``.

    Raises:
        InterlockError: no answer, an error status, or an answer that is no plan.
    """
    address = url.rstrip("/").removesuffix("/plan") + "/plan"
    if not address.startswith(("http://", "https://")):
        raise InterlockError(f"--receipts {url}: must begin with http:// or https://")
    request = urllib.request.Request(address)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key.reveal()}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return msgspec.json.decode(answer.read(), type=Shown)
    except urllib.error.HTTPError as error:
        hint = "; give the server's key with --api-key-file" if error.code == 401 else ""
        raise InterlockError(f"{address} answered {error.code} {error.reason}{hint}") from None
    except (urllib.error.URLError, TimeoutError) as error:
        raise InterlockError(f"{address} does not answer: {getattr(error, 'reason', error)}") from None
    except msgspec.DecodeError as error:
        raise InterlockError(f"{address} did not answer with a launch plan: {error}") from None
