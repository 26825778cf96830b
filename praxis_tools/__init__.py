"""praxis_tools: plans, explains, checks, reports, serves and supervises jobs of praxis_lite."""
