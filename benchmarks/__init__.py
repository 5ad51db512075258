"""What compiling costs and buys, measured on one machine. Each file is one subject: ``python -m benchmarks.compile_time``."""
