"""Takes two seconds to import."""

from time import sleep

sleep(2)
