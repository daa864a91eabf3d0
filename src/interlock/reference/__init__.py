"""Float64 forward passes written from the formulas alone: the oracle of tests and of ``interlock verify``.

Nothing here imports ``nn``, ``moe``, ``kernels`` or ``checkpoint``: two programs that share no code cannot
share a mistake.
"""
