"""The parts of the command: flags, what each subcommand does, files and streams, exit codes, shell completion."""
