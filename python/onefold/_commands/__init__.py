"""What the command `onefold` runs: `cli` is its entry, each other command is a module."""
