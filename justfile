# `just` lists the recipes; each calls a script that works without `just`.
default:
    @just --list

# Set up and run attention on two ranks of this machine: just run tokens=32k
run *overrides:
    scripts/run {{overrides}}

# Set up and run the tests: just test -k layout
test *arguments:
    scripts/test {{arguments}}

# Test the CUDA device of this machine, then time it: just gpu suite=gpu_quick
gpu *overrides:
    scripts/gpu {{overrides}}

# Build the pages into docs/_build/html
docs:
    scripts/docs

# Lint, format check, types
check:
    scripts/check

# A suite of alternating measurements as a page in outputs/bench/: just report standard
report *overrides:
    scripts/setup && .venv/bin/ringattn report {{overrides}}
