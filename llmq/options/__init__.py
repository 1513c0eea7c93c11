"""Which options there are: each is a field of a section, and each section is read by exactly one other module.

Sections are frozen, so a run cannot change its own settings. Whether options of a section fit together is a function of
their values alone (`contradictions`), never of which were typed and which are defaults; a default that depends on
another option (`master_dtype` on `model_dtype`) is resolved here, so readers see plain values.
"""
