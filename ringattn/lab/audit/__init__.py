"""The auditor: does a context-parallel attention compute what its mask says, forward and backward, on every rank?"""
