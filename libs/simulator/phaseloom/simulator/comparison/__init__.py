"""`phaseloom simulate`: one workload under several policies, compared in a table and a picture.

`workloadfile` reads the jobs, `workload` runs them, `cases` spreads the runs over processes, and
`report` and `pictures` show the results. The scenarios of the papers, which are not a part of the
product, use the same parts.
"""
