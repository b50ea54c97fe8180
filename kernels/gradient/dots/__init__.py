"""Weight gradients on products of bf16 pairs: schedule, compiled driver, units."""
