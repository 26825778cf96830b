"""praxis_tools: tools to plan, explain, check, report on, serve and supervise praxis_lite jobs."""
