"""Transfers through staging memory, for carriers that move one run of bytes at a time.

The sender gathers pieces into a slot of its staging memory and tells the receiver over a connection of their
own; the receiver *fetches* the slot, scatters it to its pages and answers. So a write is over when the
receiver itself has seen all bytes, whatever the carrier's completions mean (a TCP write of Mooncake's first
protocol completes when the last bytes enter the sender's socket); pages hold only parts that arrived whole;
and no pool is ever open to the network, only staging memory is.
"""
