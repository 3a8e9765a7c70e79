"""The suites of `ringattn report`: every module here is one suite, named after its file, with a BenchSuite `SUITE`."""
