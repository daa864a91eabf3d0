"""Messages between the front end (HTTP, tokenisation) and the schedulers, as msgspec structs over ZeroMQ.

One front-end process talks to one scheduler for each attention-data-parallel replica.
"""

from __future__ import annotations

import msgspec

from interlock.structured.spec import GrammarSpec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it ends.

    Text-level fields (``stop``, ``skip_special_tokens``, ``include_stop_str_in_output``) are used by the
    front end; everything else by the scheduler and the sampler.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps the whole vocabulary.
        logprobs: None gives none; an integer gives the chosen token's and that many top alternatives.
        prompt_logprobs: the same for the prompt's tokens (the first has none).
        forced_token_ids: the first generated tokens, whatever the logits say (log-probabilities still are the
            model's). For comparing engines on the same text; the HTTP API does not offer it.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    forced_token_ids: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and the best alternatives, ``top`` as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Inspection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What ``verify`` asks of a request beyond its answer. The HTTP API does not offer it.

    Attributes:
        chunk_limit: most tokens of the request in one prefill step; 0 leaves it to the scheduler.
        trace: folder into which every rank writes what its layers computed; "" for no trace.
        routes: file with experts and weights that ranks take in place of their routers' choice; "" for none.
        first, last: only positions ``first : last`` are traced.
    """

    chunk_limit: int = 0
    trace: str = ""
    routes: str = ""
    first: int = 0
    last: int = 1 << 40


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two halves of a disaggregated request meet; a router gives both the same.

    Attributes:
        host, port: of the prefill server's bootstrap socket.
        room: a random number that no other request of the pair has.
        choice: number of the choice within the HTTP request of that room.
    """

    host: str
    port: int
    room: int
    choice: int = 0


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add", omit_defaults=True):
    """Generate from ``token_ids``. ``sampling.n`` is 1 here: the front end expands n > 1.

    ``grammar``: what the answer must match; the front end has seen it compile.
    ``meeting``: given to prefill and decode servers, and to them only.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    inspection: Inspection | None = None
    grammar: GrammarSpec | None = None
    meeting: Meeting | None = None


class AddRequests(msgspec.Struct, frozen=True, tag="add_all"):
    """Requests that were submitted together: all are queued before the next step is chosen."""

    requests: tuple[AddRequest, ...]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """End a request wherever it is; its last delta has the finish reason "abort"."""

    request_id: str


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Drop every cached prefix that no running request uses."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the rank with exit code 0."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Another replica got work: take part in its steps without waiting for the next idle tick."""


class RecordSteps(msgspec.Struct, frozen=True, tag="record"):
    """From now on, say (or no longer say) with every step's outputs what the step was."""

    on: bool


ToEngine = AddRequest | AddRequests | AbortRequest | FlushCache | Shutdown | Wake | RecordSteps


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="delta"):
    """What one step added to one request.

    Attributes:
        token_ids: new tokens; a matched stop token or end-of-sequence token is included.
        logprobs: one entry for each new token when they were asked for.
        prompt_logprobs: sent once, with the first delta; entry 0 (the first prompt token) is None.
        finish_reason: None while running, else "stop", "length", "abort" or "error".
        stop_token_id: the token that ended the request, when a token did.
        error: message for "error".
        refused: the error is what the client asked for, not a fault of the engine.
        peer_failed: the error is that the other server of a disaggregated pair failed or did not answer.
        queue_seconds: sent once, with the first delta: from arrival at the scheduler to first admission.
        chunk_ends: sent once, with the first delta of an inspected request: where its prefill steps ended.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    refused: bool = False
    peer_failed: bool = False
    queue_seconds: float | None = None
    chunk_ends: tuple[int, ...] = ()


class TransferStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prefill or decode replica's part in transfers; ``*_total`` only grow.

    Attributes:
        role: "prefill" or "decode".
        states: requests that are not handed over yet, by state of this half (engine/disaggregation).
        peers: servers of the other role that it is connected to.
        pages_held: pages, of both spaces, that a transfer may read or write.
        pages_quarantined: of those, pages of requests that are over for their clients.
        copies_pending: ordered and not finished.
        tokens_total: prompt tokens whose keys and values were ordered to move (prefill) or moved (decode).
        copies_total, bytes_total, seconds_total, copy_failures_total: of a prefill replica, summed over its
            ranks; seconds are those spent writing.
        exposed_seconds_total: for which computed prompts waited for their last pages: what the computing of
            chunks did not hide of a transfer.
    """

    role: str = ""
    states: dict[str, int] = {}
    peers: int = 0
    pages_held: int = 0
    pages_quarantined: int = 0
    copies_pending: int = 0
    tokens_total: int = 0
    handed_over_total: int = 0
    failed_total: int = 0
    copies_total: int = 0
    bytes_total: int = 0
    seconds_total: float = 0.0
    copy_failures_total: int = 0
    exposed_seconds_total: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of one scheduler. Plain counts unless the name says otherwise; ``*_total`` only grow.

    ``receiving``: requests that hold pages which another server fills. ``transfer``: None on a server that
    does both phases.
    """

    replica: int = 0
    running: int = 0
    waiting: int = 0
    receiving: int = 0
    full_pages: int = 0
    full_pages_free: int = 0
    full_pages_cached: int = 0
    window_pages: int = 0
    window_pages_free: int = 0
    window_pages_cached: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    retractions_total: int = 0
    aborts_total: int = 0
    steps_prefill_total: int = 0
    steps_decode_total: int = 0
    transfer: TransferStats | None = None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step of one replica as it was really run; sent while ``RecordSteps`` is on.

    Attributes:
        turn: counts the agreements of all replicas, so that records of one step have the same number.
        phase: "prefill" or "decode".
        tokens: computed by this replica, without padding; 0 where it only took part.
        sequences: requests in the step.
        kv_tokens: sum of their lengths, this step's tokens included.
        begun, ended: seconds of this machine's monotonic clock, from the end of the previous turn (or the
            end of an idle wait) until the tokens were sampled.
    """

    turn: int
    phase: str
    tokens: int
    sequences: int
    kv_tokens: int
    begun: float
    ended: float


class EngineOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """Everything one step of one scheduler has to say; also sent as a heartbeat when idle."""

    replica: int = 0
    deltas: tuple[TokenDelta, ...] = ()
    stats: SchedulerStats = SchedulerStats()
    step: StepRecord | None = None


class RankReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """A rank is built and warmed up. ``receipts``: plan item -> what this rank observed."""

    rank: int
    receipts: dict[str, object]


class RankFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A rank raised; ``error`` is one line, ``details`` the traceback for the log.

    ``is_consequence``: the error says that a peer is gone, so another rank failed first.
    """

    rank: int
    error: str
    details: str = ""
    is_consequence: bool = False


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """A sign of life from a rank's side thread.

    ``iteration`` counts turns of the rank's loop. ``activity`` is what the loop is doing: "loading",
    "idle", "waiting for ranks" or "computing"; ``activity_seconds`` for how long.
    """

    rank: int
    iteration: int
    activity: str
    activity_seconds: float


class PhaseLoad(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one rank did in the counted steps of one phase since it started; see ``moe/meter.py``.

    Attributes:
        tokens: that it dispatched, padding excluded; ``most_tokens`` in one step; T is ``capacity``.
        dispatch_seconds, dispatch_calls: of timed calls, one a layer; likewise for combine. The time includes
            waiting for slower ranks.
        rows: received by each local expert: little-endian int64 [layers, experts].
    """

    capacity: int
    steps: int
    tokens: int
    most_tokens: int
    dispatch_seconds: float
    dispatch_calls: int
    combine_seconds: float
    combine_calls: int
    rows: bytes


class RankLoad(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """The load of one rank, sent every second or so while there is some. All counts only grow.

    Attributes:
        layers: decoder layers with experts.
        first_expert, experts: global ids of the experts held here.
        is_slice: another rank holds the other part of the same experts and reports the same rows.
        sample_every: one step in so many is counted.
        graph_replays, graph_misses: decode steps that ran as a CUDA graph, and those that were too large.
    """

    rank: int
    layers: tuple[int, ...]
    first_expert: int
    experts: int
    is_slice: bool
    sample_every: int
    prefill: PhaseLoad
    decode: PhaseLoad
    graph_replays: int = 0
    graph_misses: int = 0


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A rank process of another node ended; ``code`` is its exit code, negative for a signal."""

    rank: int
    code: int


class NodeLeaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """A node was told to end by a signal; its ranks go on until running requests are done."""

    node_rank: int


FromEngine = EngineOutputs | RankReady | RankFailed | Heartbeat | RankLoad | RankEnded | NodeLeaving


class EngineEnded(msgspec.Struct, frozen=True, kw_only=True, tag="engine_ended"):
    """The front end's last word to the launchers of other nodes; ``reason`` is "" for an orderly end.

    ``is_stall``: nothing failed, but a rank makes no progress, so it matters where every rank is.
    """

    reason: str
    is_stall: bool = False
