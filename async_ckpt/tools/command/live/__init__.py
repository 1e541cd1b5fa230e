"""The subcommands that run until they are stopped."""
