"""Where the rooms meet: argv, environment, files and exit codes. No arithmetic."""
