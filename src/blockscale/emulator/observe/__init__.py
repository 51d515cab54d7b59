"""What is observed of a launch: reports, traces and traffic."""
