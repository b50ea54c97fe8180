"""Weight gradients on register tiles of f32: schedule, tables, compiled driver, units."""
