"""Where experts go: footprint, planner, profiles, traces and the simulator (pure)."""
