"""Every a2a backend on the GPUs of this machine: proven, verified against another, measured.

    python benchmarks/gpu_ranks.py --ranks 8 --out results --limit 7200
    python benchmarks/gpu_ranks.py --ranks 4 --ranks-per-gpu 4 --out results --stages conformance-symmetric

With ``--ranks-per-gpu`` it is a rehearsal: start the NVIDIA Multi-Process Service first (docs/rehearsal.md).

Stages, for each backend of ``--a2a``: ``conformance-B`` (bit for bit against the oracle), ``tiny-B``,
``pro-B`` and ``demo-B`` (``verify``: the first backend is the control). For all: ``a2a-HIDDEN-DTYPE``
(dispatch and combine by tokens), ``decode`` and ``prefill`` (MiMo-V2-Flash, plain TP beside every backend),
``switches`` (decode with graphs and two-batch overlap on and off). ``--dry-run`` prints the commands.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass

from stages import Stage, add_arguments, chosen, run_stages

INTERLOCK = [sys.executable, "-m", "interlock"]
TOKENS = "1,8,32,64,128,512,1024,4096,8192"
EXPERTS = {4096: 256, 6144: 384, 7168: 256}
"""By hidden size: MiMo-V2-Flash, MiMo-V2.5-Pro, DeepSeek-V3."""
CHUNK = 16384
BATCHES = "32,64,128,256,512"
SMALL = "--no-prefix-cache --max-running-requests 8 --chunked-prefill-size 160 --max-model-len 320"
DUMMY = "--load-format dummy"


@dataclass(frozen=True, slots=True)
class Session:
    """What the stages are made of. ``layers``: of the shapes that are measured; None for all of them."""

    ranks: int
    ranks_per_gpu: int
    a2a: tuple[str, ...]
    layers: int | None
    out: str

    @property
    def world(self) -> str:
        return (
            f"--tp-size {self.ranks} --attn-dp-size {self.ranks} --ep-size {self.ranks} "
            f"--ranks-per-gpu {self.ranks_per_gpu}"
        )

    @property
    def plain_tp(self) -> str:
        return f"--tp-size {self.ranks} --ranks-per-gpu {self.ranks_per_gpu} --moe-a2a-backend none"

    @property
    def chunk(self) -> int:
        """Ranks that share a GPU share its memory, which buffers for a full chunk would fill."""
        return CHUNK // self.ranks_per_gpu

    @property
    def cut(self) -> str:
        return "" if self.layers is None else f" --num-hidden-layers {self.layers}"


def stages(session: Session) -> list[Stage]:
    return [
        *(_conformance(session, backend) for backend in session.a2a),
        *(
            _verify(session, name, model, options, backend)
            for name, model, options in (
                ("tiny", "tiny-random", f"{DUMMY} --dtype bfloat16 {SMALL}"),
                ("pro", "shape:mimo-v2.5-pro", f"{DUMMY} --num-hidden-layers 4 {SMALL}"),
                ("demo", "demo", SMALL),
            )
            for backend in session.a2a[1:]
        ),
        *(_a2a(session, hidden, dtype) for hidden in EXPERTS for dtype in ("bfloat16", "fp8")),
        _decode(session),
        _prefill(session),
        _switches(session),
    ]


def _conformance(session: Session, backend: str) -> Stage:
    command = ["conformance", f"a2a:{backend}", "--device", "cuda", "--ranks", str(session.ranks)]
    return Stage(f"conformance-{backend}", 300, [*INTERLOCK, *command, "--cases", "48"])


def _verify(session: Session, name: str, model: str, options: str, backend: str) -> Stage:
    arm = f"{options} {session.world} --moe-a2a-backend"
    command = ["verify", model, "--out", f"{session.out}/{name}-{backend}"]
    arms = ["--control", f"{arm} {session.a2a[0]}", "--candidate", f"{arm} {backend}"]
    return Stage(f"{name}-{backend}", 600, [*INTERLOCK, *command, *arms])


def _a2a(session: Session, hidden: int, dtype: str) -> Stage:
    shape = ["--hidden", str(hidden), "--experts", str(EXPERTS[hidden]), "--dtype", dtype]
    ranks = ["--ranks", str(session.ranks), "--ranks-per-gpu", str(session.ranks_per_gpu)]
    command = ["bench", "a2a", "--device", "cuda", "--tokens", TOKENS, *ranks, *shape]
    return Stage(f"a2a-{hidden}-{dtype}", 600, [*INTERLOCK, *command, "--out", session.out])


def _arms(arms: dict[str, str]) -> list[str]:
    return [word for name, options in arms.items() for word in ("--arm", f"{name}={options}")]


def _decode(session: Session) -> Stage:
    base = f"{DUMMY}{session.cut} --max-running-requests 512 --max-model-len 512"
    arms = {"tp": f"{base} {session.plain_tp}"}
    arms |= {name: f"{base} {session.world} --moe-a2a-backend {name}" for name in session.a2a}
    return _bench(session, "decode", ["--batch", BATCHES], arms)


def _prefill(session: Session) -> Stage:
    base = f"{DUMMY}{session.cut} --chunked-prefill-size {session.chunk} --max-model-len 9216"
    arms = {"tp": f"{base} {session.plain_tp}"}
    arms |= {name: f"{base} {session.world} --moe-a2a-backend {name}" for name in session.a2a}
    return _bench(session, "prefill", ["--chunk", str(session.chunk), "--prompt-tokens", "2048"], arms)


def _switches(session: Session) -> Stage:
    """The control declares the overlap; the last backend is captured."""
    base = f"{DUMMY}{session.cut} --max-running-requests 512 --max-model-len 512 {session.world}"
    first, last = session.a2a[0], session.a2a[-1]
    arms = {
        f"{first} overlap {way}": f"{base} --moe-a2a-backend {first} --moe-overlap {way}"
        for way in ("off", "on")
    }
    arms |= {
        f"{last} graphs {size}": f"{base} --moe-a2a-backend {last} --cuda-graph-max-batch {size}"
        for size in ("0", "auto")
    }
    stage = _bench(session, "decode", ["--batch", BATCHES], arms)
    return Stage("switches", stage.limit, stage.command)


def _bench(session: Session, verb: str, sizes: list[str], arms: dict[str, str]) -> Stage:
    command = ["bench", verb, "shape:mimo-v2-flash", *sizes, "--one-at-a-time", "--out", session.out]
    return Stage(verb, 1800, [*INTERLOCK, *command, *_arms(arms)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--ranks-per-gpu", type=int, default=1)
    parser.add_argument("--a2a", nargs="+", default=["collective", "deepep_v2", "symmetric"])
    parser.add_argument("--layers", type=int, help="of the measured shapes; all by default")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    asked = parser.parse_args()
    session = Session(asked.ranks, asked.ranks_per_gpu, tuple(asked.a2a), asked.layers, str(asked.out))
    wanted = chosen(parser, asked.stages, stages(session))
    if asked.dry_run:
        for stage in wanted:
            print(f"{stage.name}: {shlex.join(stage.command)}")
        return
    run_stages(wanted, asked.out, asked.limit)


if __name__ == "__main__":
    main()
