"""The suites of `ringattn bench`: every module here is one suite, named after its file, with a BenchSuite `SUITE`."""
