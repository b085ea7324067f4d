"""The verbs of `mmqa`, one module each: SUMMARY, EXAMPLE, add_flags(parser), run(arguments).

A module imports only light modules at the top level: `run` imports what the verb needs, after
`distributed.start()` if the verb computes.
"""
