"""The verbs of `mmqa`, one module each: SUMMARY, EXAMPLE, add_flags(parser), run(arguments).

A module imports only light modules at the top level: `run` imports what the verb needs, after
`distributed.start()` if the verb computes.

Flags that may name a place in an object store (gs://, s3://) stand in a verb's STORE_INPUTS (copied
to this host before they are read: flags.fetched) and STORE_OUTPUTS (written in place); STORE_CONFIG
says that its config may. Other verbs and flags refuse such a place.
"""
