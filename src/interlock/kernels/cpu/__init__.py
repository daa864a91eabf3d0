"""Native CPU kernels: C++ compiled for this machine on first use, called through ctypes."""
